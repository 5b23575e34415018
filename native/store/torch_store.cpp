#include "store/torch_store.hpp"

#include <algorithm>
#include <array>
#include <charconv>

namespace procgroup::store {
namespace {

// The arguments of each operation, in the order of TorchOp: k a key, v a value, n a number of 8 bytes, w one of 4;
// '*': a count, and so many times what follows.
constexpr std::array<std::string_view, 19> kKinds{
    "w", "kv", "kvv", "k", "kn", "*k", "*k", "", "k", "kv", "*k", "*kv", "", "w", "kv", "k", "k", "", "kn",
};
static_assert(kKinds.size() == size_t{static_cast<uint8_t>(TorchOp::kBarrier)} + 1);

constexpr size_t kCountBytes = 8;

uint64_t number_at(std::string_view input, size_t position) {
  uint64_t number;
  std::memcpy(&number, input.data() + position, sizeof number);
  return number;
}

void check_limit(const char* what, uint64_t size, uint64_t limit) {
  if (size <= limit) return;
  throw ProtocolError{std::string(what) + " of " + std::to_string(size) + " bytes, more than the limit of " +
                      std::to_string(limit)};
}

std::string as_bytes(int64_t number) {
  std::string bytes;
  put(bytes, static_cast<uint64_t>(number));
  return bytes;
}

int64_t as_number(std::string_view bytes) {
  int64_t number;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

template <class Reply>
std::string as_byte(Reply reply) {
  return std::string(1, static_cast<char>(reply));
}

// Torch's server takes leading blanks and a plus sign, and ignores what follows the digits.
std::string_view without_lead(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size()));
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  return text;
}

// Estimated memory of a container's entry beside its bytes.
constexpr size_t kEntryBytes = 128;

size_t cost_of(std::string_view key, const Value& value) { return kEntryBytes + key.size() + value->size(); }
// A wait's key is kept twice, by key and by connection.
size_t cost_of_wait(std::string_view key) { return 2 * (kEntryBytes + key.size()); }

void check_reply_size(size_t size) {
  if (size > kTorchMaxReplyBytes) throw ProtocolError{"its reply would have " + std::to_string(size) + " bytes"};
}

}  // namespace

std::optional<TorchRequest> TorchParser::parse(std::string_view input) {
  if (position_ == 0 && !start(input)) return {};
  while (rounds_ > 0) {
    if (!take_argument(input, kinds_[kind_])) return {};
    if (++kind_ < kinds_.size()) continue;
    kind_ = 0;
    --rounds_;
  }
  TorchRequest request{static_cast<TorchOp>(input.front()), {}, std::exchange(position_, 0)};
  request.arguments.reserve(arguments_.size());
  for (const auto& [position, size] : std::exchange(arguments_, {})) {
    request.arguments.push_back(input.substr(position, size));
  }
  return request;
}

// Reads the operation, and the count of what is repeated; returns whether they are there.
bool TorchParser::start(std::string_view input) {
  if (input.empty()) return false;
  const auto op = static_cast<uint8_t>(input.front());
  if (op >= kKinds.size() || op == static_cast<uint8_t>(TorchOp::kValidate)) {
    throw ProtocolError{"an unknown operation " + std::to_string(op) + " of PyTorch's TCPStore"};
  }
  kinds_ = kKinds[op];
  rounds_ = kinds_.empty() ? 0 : 1;
  size_t position = 1;
  if (kinds_.starts_with('*')) {
    if (input.size() < position + kCountBytes) return false;
    rounds_ = number_at(input, position);
    if (rounds_ > kMaxKeysPerRequest) throw ProtocolError{"a request with too many keys"};
    kinds_.remove_prefix(1);
    position += kCountBytes;
  }
  position_ = position;
  return true;
}

bool TorchParser::take_argument(std::string_view input, char kind) {
  const bool sized = kind == 'k' || kind == 'v';
  const size_t left = input.size() - position_;
  size_t begin = position_;
  uint64_t size = kind == 'n' ? sizeof(int64_t) : sizeof(uint32_t);
  if (sized) {
    if (left < kCountBytes) return false;
    size = number_at(input, position_);
    begin += kCountBytes;
    check_limit(kind == 'k' ? "a key" : "a value", size, kind == 'k' ? kMaxKeyBytes : kTorchMaxValueBytes);
    check_limit("a request", begin + size, kTorchMaxRequestBytes);
  }
  if (input.size() < begin + size) return false;
  arguments_.emplace_back(begin, size);
  position_ = begin + size;
  return true;
}

// --- the table ---

void TorchTable::run(uint64_t connection, const TorchRequest& request) {
  const Arguments& arguments = request.arguments;
  const std::string key(arguments.empty() ? std::string_view() : arguments.front());
  switch (request.op) {
    case TorchOp::kSet:
      return set(key, make_value(arguments[1]));
    case TorchOp::kCompareSet:
      return compare_set(connection, arguments);
    case TorchOp::kGet:
      return deliver_(connection, TorchReply{{}, {find(key)}});
    case TorchOp::kAdd:
      return add(connection, key, as_number(arguments[1]));
    case TorchOp::kCheck: {
      const auto there = [this](std::string_view each) { return exists(std::string(each)); };
      const bool all = std::all_of(arguments.begin(), arguments.end(), there);
      return reply(connection, as_byte(all ? TorchCheckReply::kReady : TorchCheckReply::kNotReady));
    }
    case TorchOp::kWait:
      return wait(connection, arguments);
    case TorchOp::kNumKeys:
      return reply_number(connection, static_cast<int64_t>(values_.size()));
    case TorchOp::kDelete:
      return reply_number(connection, erase(key));
    case TorchOp::kAppend:
      return append(key, arguments[1]);
    case TorchOp::kMultiGet:
      return multi_get(connection, arguments);
    case TorchOp::kMultiSet:
      return multi_set(arguments);
    case TorchOp::kCancelWait:
      forget(connection);
      return reply(connection, as_byte(TorchWaitReply::kWaitCancelled));
    case TorchOp::kPing:
      return reply(connection, key);
    case TorchOp::kQueuePush:
      return queue_push(key, arguments[1]);
    case TorchOp::kQueuePop:
      return queue_pop(connection, key);
    case TorchOp::kQueueLength: {
      const auto found = queues_.find(key);
      return reply_number(connection, found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size()));
    }
    case TorchOp::kListKeys:
      return list_keys(connection);
    case TorchOp::kBarrier:
      return barrier(connection, key, as_number(arguments[1]));
    case TorchOp::kValidate:
      break;
  }
}

void TorchTable::forget(uint64_t connection) {
  const auto wait = waits_.find(connection);
  if (wait == waits_.end()) return;
  for (const auto& [key, position] : wait->second) {
    kept_bytes_ -= cost_of_wait(key);
    const auto waiters = waiters_.find(key);
    waiters->second.erase(position);
    if (waiters->second.empty()) waiters_.erase(waiters);
  }
  waits_.erase(wait);
}

void TorchTable::clear() {
  waits_.clear();
  waiters_.clear();
  queues_.clear();
  values_.clear();
  kept_bytes_ = 0;
}

void TorchTable::set(const std::string& key, Value value) {
  keep(key, std::move(value));
  wake_all(key);
}

// The replaced value still counts when the limit is checked.
void TorchTable::keep(const std::string& key, Value value) {
  const size_t cost = cost_of(key, value);
  check_fits(cost);
  erase(key);
  values_.emplace(key, std::move(value));
  kept_bytes_ += cost;
}

int64_t TorchTable::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return 0;
  kept_bytes_ -= cost_of(key, found->second);
  values_.erase(found);
  return 1;
}

void TorchTable::check_fits(size_t bytes) const {
  if (kept_bytes_ + bytes <= kTorchMaxKeptBytes) return;
  throw ProtocolError{"PyTorch's clients keep " + std::to_string(kept_bytes_) + " bytes already, and " +
                      std::to_string(bytes) + " more exceed the limit of " + std::to_string(kTorchMaxKeptBytes)};
}

// A missing key is set when the expected value is empty; otherwise the expected value is returned, as in torch.
void TorchTable::compare_set(uint64_t connection, const Arguments& arguments) {
  const std::string key(arguments[0]);
  const std::string_view expected = arguments[1];
  const auto found = values_.find(key);
  const bool present = found != values_.end();
  const bool matches = present ? *found->second == expected : expected.empty();
  if (!matches) return deliver_(connection, TorchReply{{}, {present ? found->second : make_value(expected)}});
  const Value desired = make_value(arguments[2]);
  set(key, desired);
  deliver_(connection, TorchReply{{}, {desired}});
}

void TorchTable::add(uint64_t connection, const std::string& key, int64_t amount) {
  const int64_t sum = sum_at(key, amount);
  set(key, make_value(std::to_string(sum)));
  reply_number(connection, sum);
}

void TorchTable::wait(uint64_t connection, const Arguments& keys) {
  check_may_wait(connection);
  std::vector<std::string> missing;
  for (const std::string_view each : keys) {
    std::string key(each);
    if (!exists(key)) missing.push_back(std::move(key));
  }
  if (missing.empty()) return reply(connection, as_byte(TorchWaitReply::kStopWaiting));
  begin_wait(connection, missing);
}

void TorchTable::append(const std::string& key, std::string_view tail) {
  const Value before = find(key);
  if (before->size() + tail.size() > kTorchMaxValueBytes) {
    throw ProtocolError{"append: the value at key '" + printable(key) + "' would have " +
                        std::to_string(before->size() + tail.size()) + " bytes"};
  }
  std::string joined = *before;
  joined.append(tail);
  set(key, std::make_shared<const std::string>(std::move(joined)));
}

void TorchTable::multi_get(uint64_t connection, const Arguments& keys) {
  TorchReply answer;
  size_t total = 0;
  for (const std::string_view key : keys) {
    answer.values.push_back(find(std::string(key)));
    total += sizeof(uint64_t) + answer.values.back()->size();
  }
  check_reply_size(total);
  deliver_(connection, std::move(answer));
}

void TorchTable::multi_set(const Arguments& arguments) {
  size_t total = 0;
  for (const std::string_view argument : arguments) total += kEntryBytes + argument.size();
  check_fits(total);
  for (size_t i = 0; i < arguments.size(); i += 2) set(std::string(arguments[i]), make_value(arguments[i + 1]));
}

// A client that waited fetches the value with kQueuePop.
void TorchTable::queue_push(const std::string& key, std::string_view value) {
  Value pushed = make_value(value);
  const size_t cost = cost_of(key, pushed);
  check_fits(cost);
  queues_[key].push_back(std::move(pushed));
  kept_bytes_ += cost;
  wake_one(key);
}

void TorchTable::queue_pop(uint64_t connection, const std::string& key) {
  const auto found = queues_.find(key);
  if (found == queues_.end()) return reply_number(connection, 0);
  TorchReply answer{as_bytes(static_cast<int64_t>(found->second.size())), {found->second.front()}};
  kept_bytes_ -= cost_of(key, found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  deliver_(connection, std::move(answer));
}

void TorchTable::list_keys(uint64_t connection) {
  std::string keys = as_bytes(static_cast<int64_t>(values_.size()));
  for (const auto& [key, value] : values_) {
    put(keys, key.size());
    keys.append(key);
    check_reply_size(keys.size());
  }
  reply(connection, std::move(keys));
}

// The key counts the arrivals and is not reset: a second barrier at the same key ends at once, as in torch.
void TorchTable::barrier(uint64_t connection, const std::string& key, int64_t world_size) {
  check_may_wait(connection);
  const int64_t arrived = sum_at(key, 1);
  keep(key, make_value(std::to_string(arrived)));
  if (arrived < world_size) return begin_wait(connection, {key});
  wake_all(key);
  reply(connection, as_byte(TorchWaitReply::kStopWaiting));
}

Value TorchTable::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? make_value({}) : found->second;
}

// The number that the key's value begins with, and `amount`.
int64_t TorchTable::sum_at(const std::string& key, int64_t amount) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return amount;
  const std::string_view text = without_lead(*found->second);
  int64_t number = 0;
  const std::errc error = std::from_chars(text.data(), text.data() + text.size(), number).ec;
  if (error != std::errc() || __builtin_add_overflow(number, amount, &number)) {
    throw ProtocolError{"cannot add " + std::to_string(amount) + " to key '" + printable(key) + "', which holds '" +
                        printable(*found->second) + "': it is not a decimal number, or the sum exceeds 64 bits"};
  }
  return number;
}

void TorchTable::check_may_wait(uint64_t connection) const {
  if (waits_.contains(connection)) throw ProtocolError{"a second wait before the end of the first"};
}

void TorchTable::begin_wait(uint64_t connection, const std::vector<std::string>& missing) {
  size_t total = 0;
  for (const std::string& key : missing) total += cost_of_wait(key);
  check_fits(total);
  Wait& wait = waits_[connection];
  for (const std::string& key : missing) {
    if (wait.contains(key)) continue;
    Waiters& waiters = waiters_[key];
    wait.emplace(key, waiters.insert(waiters.end(), connection));
    kept_bytes_ += cost_of_wait(key);
  }
}

void TorchTable::wake_all(const std::string& key) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  const Waiters waiters = std::move(found->second);
  waiters_.erase(found);
  for (const uint64_t connection : waiters) end_wait_for(connection, key);
}

void TorchTable::wake_one(const std::string& key) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  Waiters& waiters = found->second;
  for (bool ended = false; !waiters.empty() && !ended;) {
    const uint64_t connection = waiters.front();
    waiters.pop_front();
    ended = end_wait_for(connection, key);
  }
  if (waiters.empty()) waiters_.erase(found);
}

// Remove the key from the connection's wait, and end the wait if it was the last one; returns whether it was.
bool TorchTable::end_wait_for(uint64_t connection, const std::string& key) {
  const auto wait = waits_.find(connection);
  if (wait == waits_.end()) return false;
  if (wait->second.erase(key) > 0) kept_bytes_ -= cost_of_wait(key);
  if (!wait->second.empty()) return false;
  waits_.erase(wait);
  reply(connection, as_byte(TorchWaitReply::kStopWaiting));
  return true;
}

void TorchTable::reply_number(uint64_t connection, int64_t number) { reply(connection, as_bytes(number)); }

}  // namespace procgroup::store
