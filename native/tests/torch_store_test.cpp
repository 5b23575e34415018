// The protocol of PyTorch's TCPStore: its parser, its table, and a server that answers it beside its own.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "store/client.hpp"
#include "store/server.hpp"
#include "store/torch_table.hpp"

namespace {

using namespace procgroup;         // NOLINT
using namespace procgroup::store;  // NOLINT

using Random = std::mt19937;

constexpr int kClients = 8;
constexpr int kTurns = 50;
const Check kNothing = [] {};

// --- requests ---

std::string sized(std::string_view bytes) {
  std::string text;
  put(text, bytes.size());
  return text.append(bytes);
}

std::string number(int64_t value) {
  std::string text;
  put(text, static_cast<uint64_t>(value));
  return text;
}

std::string request(TorchOp op, const std::string& arguments = {}) {
  return std::string(1, static_cast<char>(op)) + arguments;
}

std::string request_with_keys(TorchOp op, const std::vector<std::string>& keys) {
  std::string arguments = number(static_cast<int64_t>(keys.size()));
  for (const std::string& key : keys) arguments += sized(key);
  return request(op, arguments);
}

struct Example {
  std::string bytes;
  std::vector<std::string> arguments;
};

const std::vector<Example>& examples() {
  static const std::string key = sized("/key");
  static const std::vector<Example> all{
      {request(TorchOp::kSet, key + sized("value")), {"/key", "value"}},
      {request(TorchOp::kCompareSet, key + sized("") + sized("new")), {"/key", "", "new"}},
      {request(TorchOp::kGet, key), {"/key"}},
      {request(TorchOp::kAdd, key + number(-3)), {"/key", number(-3)}},
      {request_with_keys(TorchOp::kCheck, {}), {}},
      {request_with_keys(TorchOp::kWait, {"a", "", "c"}), {"a", "", "c"}},
      {request(TorchOp::kNumKeys), {}},
      {request(TorchOp::kDelete, key), {"/key"}},
      {request(TorchOp::kAppend, key + sized(std::string(3000, 'x'))), {"/key", std::string(3000, 'x')}},
      {request_with_keys(TorchOp::kMultiGet, {"a", "b"}), {"a", "b"}},
      {request(TorchOp::kMultiSet, number(2) + key + sized("1") + sized("b") + sized("2")), {"/key", "1", "b", "2"}},
      {request(TorchOp::kCancelWait), {}},
      {request(TorchOp::kPing, "pid."), {"pid."}},
      {request(TorchOp::kQueuePush, key + sized("value")), {"/key", "value"}},
      {request(TorchOp::kQueuePop, key), {"/key"}},
      {request(TorchOp::kQueueLength, key), {"/key"}},
      {request(TorchOp::kListKeys), {}},
      {request(TorchOp::kBarrier, key + number(4)), {"/key", number(4)}},
  };
  return all;
}

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
  Random random(1);
  for (int turn = 0; turn < 20'000; ++turn) {
    std::string stream;
    for (size_t i = random() % 100; i > 0; --i) stream += static_cast<char>(random() % (turn % 2 ? 256 : 20));
    parse_in_random_parts(stream, random);
  }
}

std::string damaged(Random& random) {
  std::string stream;
  for (int i = 0; i < 5; ++i) stream += examples()[random() % examples().size()].bytes;
  for (int i = 0; i < 3; ++i) stream[random() % stream.size()] = static_cast<char>(random());
  return stream.substr(0, random() % stream.size());
}

void damaged_requests_do_no_harm() {
  Random random(2);
  for (int turn = 0; turn < 5'000; ++turn) parse_in_random_parts(damaged(random), random);
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
  Random random(3);
  Waits waits(random);
  for (int turn = 0; turn < 50'000; ++turn) waits.step();
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

void what_ends_gives_its_room_back() {
  Random random(5);
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

// --- a server ---

int listen_on_loopback() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(listener, 1024) == 0);
  return listener;
}

// A client of torch's protocol; what it sends goes out as it is.
class TorchClient {
 public:
  explicit TorchClient(const Server& server) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server.port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    const int on = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    send(kTorchValidation);
  }
  // Returns whether the connection still took it.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Empty once the connection is closed.
  std::string receive(size_t size) {
    std::string bytes(size, '\0');
    return recv(socket_.get(), bytes.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size) ? bytes : std::string();
  }
  std::string ask(const std::string& bytes, size_t size) {
    CHECK(send(bytes));
    return receive(size);
  }
  void drain() {
    shutdown(socket_.get(), SHUT_WR);
    while (!receive(1).empty()) {
    }
  }

 private:
  FileDescriptor socket_;
};

Deadline soon() { return Deadline::after(20); }

uint64_t add_as_procgroup(const Server& server, std::string_view key, uint64_t amount) {
  Client client({{"127.0.0.1"}, server.port(), {}, 0}, soon(), kNothing);
  std::string body;
  put_field(body, key);
  put(body, amount);
  return BodyReader(client.request(Op::kAdd, body, {}, soon(), kNothing).body).take<uint64_t>();
}

void work(const Server& server, int rank) {
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  const std::string value(40'000, static_cast<char>('a' + rank));
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::string prefix = "turn " + std::to_string(turn) + " of ";
    const std::string next = prefix + std::to_string((rank + 1) % kClients);
    client.ask(request(TorchOp::kAdd, sized("total") + number(1)), 8);
    CHECK(client.send(request(TorchOp::kSet, sized(prefix + std::to_string(rank)) + sized(value))));
    CHECK(client.ask(request_with_keys(TorchOp::kWait, {next, "total"}), 1)[0] == char(TorchWaitReply::kStopWaiting));
    CHECK(client.ask(request(TorchOp::kGet, sized(next)), 8 + value.size()).back() == 'a' + (rank + 1) % kClients);
    if (rank == 0) add_as_procgroup(server, "total", 1);
  }
}

void clients_of_both_protocols_share_a_server() {
  Server server(listen_on_loopback(), {}, true);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kClients; ++rank) threads.emplace_back([&, rank] { work(server, rank); });
  for (std::thread& thread : threads) thread.join();
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kAdd, sized("total") + number(0)), 8) == number(kClients * kTurns));
  CHECK(add_as_procgroup(server, "total", 0) == kTurns);
}

// Clients come, wait and are cut off, while another thread has them forgotten again and again.
void forgetting_closes_the_connections_and_clears_the_keys() {
  Server server(listen_on_loopback(), {}, true);
  add_as_procgroup(server, "kept", 7);
  std::atomic<int> cut_off{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 5; ++turn) {
        TorchClient client(server);
        client.send(request(TorchOp::kSet, sized("key") + sized("value")));
        client.send(request_with_keys(TorchOp::kWait, {"never"}));
        CHECK(client.receive(1).empty());
        ++cut_off;
      }
    });
  }
  while (cut_off < kClients * 5) server.forget_torch();
  for (std::thread& thread : threads) thread.join();
  server.forget_torch();
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kNumKeys), 8) == number(0));
  CHECK(add_as_procgroup(server, "kept", 0) == 7);
  server.stop();
  server.forget_torch();
}

// Each is sent one large reply, which it does not read.
void clients_that_do_not_read_are_closed_beyond_the_bound() {
  Server server(listen_on_loopback(), {}, true);
  TorchClient writer(server);
  writer.send(request(TorchOp::kSet, sized("key") + sized(std::string(kTorchMaxValueBytes, 'x'))));
  CHECK(writer.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  constexpr size_t kMost = kTorchMaxQueuedBytes / (3 * kTorchMaxValueBytes);
  std::vector<std::unique_ptr<TorchClient>> idle;
  for (size_t i = 0; i < 4 * kMost; ++i) {
    idle.push_back(std::make_unique<TorchClient>(server));
    idle.back()->send(request_with_keys(TorchOp::kMultiGet, {"key", "key", "key"}));
  }
  while (server.list_guests().size() > 2 * kMost + 1) std::this_thread::yield();
  CHECK(writer.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  idle.clear();
  while (server.list_guests().size() > 1) std::this_thread::yield();
  const size_t reply = 8 + kTorchMaxValueBytes;
  CHECK(writer.ask(request(TorchOp::kGet, sized("key")), reply).size() == reply);
}

// A client that always has more requests does not keep the server from the others.
void a_stream_of_requests_leaves_turns_to_others() {
  Server server(listen_on_loopback(), {}, true);
  std::atomic<bool> ends{false};
  std::thread busy([&] {
    TorchClient client(server);
    std::string stream = request(TorchOp::kSet, sized("key") + sized(std::string(1 << 20, 'x')));
    for (int i = 0; i < 1'000; ++i) stream += request(TorchOp::kAppend, sized("key") + sized("x"));
    while (!ends) client.send(stream);
  });
  for (int turn = 0; turn < 20; ++turn) CHECK(add_as_procgroup(server, "n", 1) == uint64_t(turn) + 1);
  ends = true;
  server.stop();
  busy.join();
}

void garbage_closes_its_connection_alone() {
  Server server(listen_on_loopback(), {}, true);
  TorchClient witness(server);
  Random random(4);
  for (int turn = 0; turn < 200; ++turn) {
    TorchClient client(server);
    client.send(damaged(random));
    client.drain();
  }
  CHECK(witness.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  CHECK(add_as_procgroup(server, "n", 1) == 1);
}

void a_server_that_does_not_answer_torch_closes_the_connection() {
  Server server(listen_on_loopback(), {});
  TorchClient client(server);
  CHECK(client.receive(1).empty());
  CHECK(server.requests() == 0 && server.guests() == 0);
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
  RUN_TEST(what_ends_gives_its_room_back);
  RUN_TEST(a_reply_is_bounded);
  RUN_TEST(clients_of_both_protocols_share_a_server);
  RUN_TEST(forgetting_closes_the_connections_and_clears_the_keys);
  RUN_TEST(clients_that_do_not_read_are_closed_beyond_the_bound);
  RUN_TEST(a_stream_of_requests_leaves_turns_to_others);
  RUN_TEST(garbage_closes_its_connection_alone);
  RUN_TEST(a_server_that_does_not_answer_torch_closes_the_connection);
  return 0;
}
