// The parser of PyTorch's TCPStore protocol, and the table of keys that its clients use.
#include <algorithm>
#include <memory>
#include <set>

#include "store/torch_store.hpp"
#include "tests/check.hpp"
#include "tests/store/torch_requests.hpp"

namespace {

using namespace procgroup;           // NOLINT
using namespace procgroup::store;    // NOLINT
using namespace procgroup::testing;  // NOLINT

constexpr uint64_t kClients = 8;

bool equals(const TorchRequest& found, const Example& expected) {
  return found.length == expected.bytes.size() && static_cast<char>(found.op) == expected.bytes.front() &&
         std::equal(found.arguments.begin(), found.arguments.end(), expected.arguments.begin(),
                    expected.arguments.end());
}

template <class Function>
bool is_refused(Function&& function) {
  try {
    function();
  } catch (const ProtocolError&) {
    return true;
  }
  return false;
}

// --- the parser ---

void requests_are_found_however_their_bytes_arrive() {
  for (const size_t step : {size_t{1}, size_t{2}, size_t{7}, size_t{1000}, size_t{100'000}}) {
    CASE("%zu bytes at a time", step);
    std::string stream;
    for (const Example& example : examples()) stream += example.bytes;
    TorchParser parser;
    size_t begin = 0, found = 0;
    for (size_t end = 0; end < stream.size();) {
      end = std::min(end + step, stream.size());
      // Another place in memory each time, as where a buffer grows.
      const std::string input = stream.substr(0, end);
      while (const auto got = parser.parse(std::string_view(input).substr(begin))) {
        CHECK(equals(*got, examples().at(found++)));
        begin += got->length;
      }
    }
    CHECK(found == examples().size() && begin == stream.size());
  }
}

void a_part_of_a_request_is_no_request() {
  for (const Example& example : examples()) {
    for (size_t size = 0; size < example.bytes.size(); ++size) {
      CASE("request %d, %zu bytes", example.bytes.front(), size);
      CHECK(!TorchParser().parse(std::string_view(example.bytes).substr(0, size)));
    }
  }
}

void what_is_beyond_the_limits_is_refused_before_it_has_come() {
  const auto refused = [](const std::string& bytes) { return is_refused([&] { TorchParser().parse(bytes); }); };
  const auto length = [](uint64_t size) { return number(static_cast<int64_t>(size)); };
  CHECK(refused(request(TorchOp::kGet, length(kMaxKeyBytes + 1))));
  CHECK(!refused(request(TorchOp::kGet, length(kMaxKeyBytes))));
  CHECK(refused(request(TorchOp::kSet, sized("key") + length(kTorchMaxValueBytes + 1))));
  CHECK(!refused(request(TorchOp::kSet, sized("key") + length(kTorchMaxValueBytes))));
  CHECK(refused(request(TorchOp::kSet, sized("key") + length(UINT64_MAX))));
  CHECK(refused(request(TorchOp::kWait, length(kMaxKeysPerRequest + 1))));
  CHECK(refused(request(TorchOp::kMultiSet, length(UINT64_MAX))));
  CHECK(refused(request(TorchOp::kValidate)));
  CHECK(refused(std::string(1, char{19})) && refused("\xFF") && refused("GET / HTTP/1.1\r\n"));
}

void a_request_of_many_large_values_is_refused() {
  constexpr uint64_t kValues = kTorchMaxRequestBytes / kTorchMaxValueBytes;
  std::string input = request(TorchOp::kMultiSet, number(kValues));
  for (uint64_t i = 0; i < kValues; ++i) input += sized("k") + sized(std::string(kTorchMaxValueBytes, 'x'));
  CHECK(is_refused([&] { TorchParser().parse(input); }));
}

// Give a stream to a parser in parts of random sizes. It may refuse the stream, and reads nothing beyond it.
void parse_in_random_parts(const std::string& stream, Random& random) {
  TorchParser parser;
  try {
    size_t begin = 0;
    for (size_t end = 0; end < stream.size();) {
      end = std::min(end + 1 + random() % 64, stream.size());
      const std::vector<char> exact(stream.begin() + static_cast<std::ptrdiff_t>(begin),
                                    stream.begin() + static_cast<std::ptrdiff_t>(end));
      const auto got = parser.parse({exact.data(), exact.size()});
      if (!got) continue;
      size_t bytes = 0;
      for (const std::string_view argument : got->arguments) bytes += argument.size();
      CHECK(bytes < got->length && got->length <= exact.size());
      begin += got->length;
      end = begin;
    }
  } catch (const ProtocolError&) {
  }
}

void random_bytes_do_no_harm() {
  Random random(test_seed(1));
  for (int turn = 0; turn < 20'000; ++turn) {
    CASE("turn %d", turn);
    std::string stream;
    for (size_t i = random() % 100; i > 0; --i) stream += static_cast<char>(random() % (turn % 2 ? 256 : 20));
    parse_in_random_parts(stream, random);
  }
}

void damaged_requests_do_no_harm() {
  Random random(test_seed(2));
  for (int turn = 0; turn < 5'000; ++turn) {
    CASE("turn %d", turn);
    parse_in_random_parts(damaged(random), random);
  }
}

// --- the table ---

std::string random_request(Random& random) {
  const auto key = [&] { return std::string(1, static_cast<char>('a' + random() % 6)); };
  switch (random() % 12) {
    case 0:
      return request(TorchOp::kSet, sized(key()) + sized(std::to_string(random() % 100)));
    case 1:
      return request(TorchOp::kDelete, sized(key()));
    case 2:
      return request(TorchOp::kCancelWait);
    case 3:
      return request(TorchOp::kAdd, sized(key()) + number(static_cast<int64_t>(random() % 9)));
    case 4:
      return request(TorchOp::kQueuePush, sized(key()) + sized("value"));
    case 5:
      return request(TorchOp::kQueuePop, sized(key()));
    case 6:
      return request(TorchOp::kBarrier, sized(key()) + number(static_cast<int64_t>(random() % 200)));
    case 7:
      return request(TorchOp::kCompareSet, sized(key()) + sized("") + sized("7"));
    default:
      return request_with_keys(TorchOp::kWait, {key(), key(), key()});
  }
}

// One connection at a time makes a request; the replies to others can only be the ends of their waits.
class Waits {
 public:
  explicit Waits(Random& random) : random_(random) {}

  void step() {
    const uint64_t connection = random_() % kClients;
    if (waiting_.contains(connection)) return end(connection);
    const std::string bytes = random_request(random_);
    try {
      const bool answered = run(connection, bytes);
      const auto op = static_cast<TorchOp>(bytes.front());
      const bool waits = op == TorchOp::kWait || op == TorchOp::kBarrier;
      if (waits && !answered) waiting_.insert(connection);
    } catch (const ProtocolError&) {
      CHECK(bytes.front() == char(TorchOp::kAdd) || bytes.front() == char(TorchOp::kBarrier));
    }
  }

  void check_that_nobody_waits() {
    for (uint64_t connection = 0; connection < kClients; ++connection) table_.forget(connection);
    waiting_.clear();
    for (const char key : kKeys) run(kClients, request(TorchOp::kSet, sized(std::string(1, key)) + sized("value")));
  }

 private:
  static constexpr std::string_view kKeys = "abcdef";

  void end(uint64_t connection) {
    CHECK(is_refused([&] { run(connection, request_with_keys(TorchOp::kWait, {"a"})); }));
    if (random_() % 2) {
      CHECK(run(connection, request(TorchOp::kCancelWait)));
    } else {
      table_.forget(connection);
    }
    waiting_.erase(connection);
  }

  // Returns whether the connection itself got a reply.
  bool run(uint64_t connection, const std::string& bytes) {
    replies_.clear();
    table_.run(connection, *TorchParser().parse(bytes));
    for (const auto& [other, reply] : replies_) {
      if (other == connection) continue;
      CHECK(waiting_.erase(other) == 1 && reply == std::string(1, char(TorchWaitReply::kStopWaiting)));
    }
    return std::any_of(replies_.begin(), replies_.end(), [&](const auto& each) { return each.first == connection; });
  }

  Random& random_;
  std::set<uint64_t> waiting_;
  std::vector<std::pair<uint64_t, std::string>> replies_;
  TorchTable table_{[this](uint64_t to, TorchReply&& reply) { replies_.emplace_back(to, std::move(reply.bytes)); }};
};

void every_wait_ends_once() {
  Random random(test_seed(3));
  Waits waits(random);
  for (int turn = 0; turn < 50'000; ++turn) {
    CASE("turn %d", turn);
    waits.step();
  }
  waits.check_that_nobody_waits();
}

// --- the bounds ---

// Runs requests of one connection on a table; the replies are only counted.
class OneConnection {
 public:
  void run(const std::string& bytes) { table.run(1, *TorchParser().parse(bytes)); }
  size_t replied = 0;
  TorchTable table{[this](uint64_t, TorchReply&& reply) { replied += reply.size(); }};
};

void what_is_kept_is_bounded() {
  OneConnection one;
  const std::string value = sized(std::string(kTorchMaxValueBytes, 'x'));
  size_t stored = 0;
  CHECK(is_refused([&] {
    for (;; ++stored) one.run(request(TorchOp::kSet, sized("k" + std::to_string(stored)) + value));
  }));
  CHECK(stored == kTorchMaxKeptBytes / kTorchMaxValueBytes - 1);
  CHECK(is_refused([&] { one.run(request(TorchOp::kQueuePush, sized("queue") + value)); }));
  CHECK(one.table.kept_bytes() <= kTorchMaxKeptBytes);
  one.run(request(TorchOp::kDelete, sized("k0")));
  one.run(request(TorchOp::kQueuePush, sized("queue") + value));
}

void an_appended_value_is_bounded() {
  OneConnection one;
  one.run(request(TorchOp::kSet, sized("key") + sized(std::string(kTorchMaxValueBytes, 'x'))));
  CHECK(is_refused([&] { one.run(request(TorchOp::kAppend, sized("key") + sized("x"))); }));
}

void waits_are_bounded() {
  OneConnection one;
  const std::string key(kMaxKeyBytes - 8, 'k');
  std::vector<std::string> keys;
  for (int i = 0; i < 1'000; ++i) keys.push_back(key + std::to_string(i));
  uint64_t connection = 0;
  CHECK(is_refused([&] {
    for (;; ++connection) one.table.run(connection, *TorchParser().parse(request_with_keys(TorchOp::kWait, keys)));
  }));
  CHECK(connection == kTorchMaxKeptBytes / (2 * 1'000 * kMaxKeyBytes));
}

void ended_requests_release_their_memory() {
  Random random(test_seed(5));
  OneConnection one;
  for (int turn = 0; turn < 20'000; ++turn) {
    const uint64_t connection = random() % kClients;
    try {
      one.table.run(connection, *TorchParser().parse(random_request(random)));
    } catch (const ProtocolError&) {
    }
  }
  for (uint64_t connection = 0; connection < kClients; ++connection) one.table.forget(connection);
  for (const char key : std::string_view("abcdef")) {
    one.run(request(TorchOp::kDelete, sized(std::string(1, key))));
    for (size_t before = 0; before != one.table.kept_bytes();) {
      before = one.table.kept_bytes();
      one.run(request(TorchOp::kQueuePop, sized(std::string(1, key))));
    }
  }
  CHECK(one.table.kept_bytes() == 0);
}

void a_reply_is_bounded() {
  OneConnection one;
  one.run(request(TorchOp::kSet, sized("key") + sized(std::string(16'000, 'x'))));
  const std::vector<std::string> keys(kMaxKeysPerRequest, "key");
  CHECK(is_refused([&] { one.run(request_with_keys(TorchOp::kMultiGet, keys)); }));
  CHECK(one.replied == 0);
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(requests_are_found_however_their_bytes_arrive);
  RUN_TEST(a_part_of_a_request_is_no_request);
  RUN_TEST(what_is_beyond_the_limits_is_refused_before_it_has_come);
  RUN_TEST(a_request_of_many_large_values_is_refused);
  RUN_TEST(random_bytes_do_no_harm);
  RUN_TEST(damaged_requests_do_no_harm);
  RUN_TEST(every_wait_ends_once);
  RUN_TEST(what_is_kept_is_bounded);
  RUN_TEST(an_appended_value_is_bounded);
  RUN_TEST(waits_are_bounded);
  RUN_TEST(ended_requests_release_their_memory);
  RUN_TEST(a_reply_is_bounded);
  return 0;
}
