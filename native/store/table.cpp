#include "store/table.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>

namespace procgroup::store {
namespace {

std::string as_bytes(uint64_t number) {
  std::string bytes;
  put(bytes, number);
  return bytes;
}

std::string as_byte(bool flag) { return std::string(1, flag ? '\1' : '\0'); }

std::string quoted(const std::string& key) { return "'" + key + "'"; }

StoreAnswer bare(const Value& value) { return StoreAnswer{Status::kOk, {}, {value}}; }

}  // namespace

Reply StoreAnswer::to_reply() const {
  Reply reply{status, text};
  for (const Value& value : values) {
    if (fields) put_length(reply.body, value->size());
    reply.body.append(*value);
  }
  return reply;
}

template <Op op, auto handler>
void Table::call(Ticket ticket, std::string_view body) {
  std::apply([&](auto&&... each) { (this->*handler)(ticket, std::move(each)...); }, arguments_in<op>(body));
}

void Table::run(Ticket ticket, Op op, std::string_view body) {
  using Handler = void (Table::*)(Ticket, std::string_view);
  // In the order of Op.
  static constexpr std::array<Handler, kRequests.size()> kHandlers{
      &Table::call<Op::kSet, &Table::set>,
      &Table::call<Op::kGet, &Table::get>,
      &Table::call<Op::kWait, &Table::wait>,
      &Table::call<Op::kAdd, &Table::add>,
      &Table::call<Op::kCheck, &Table::check>,
      &Table::call<Op::kCompareSet, &Table::compare_set>,
      &Table::call<Op::kDelete, &Table::delete_key>,
      &Table::call<Op::kNumKeys, &Table::num_keys>,
      &Table::call<Op::kListKeys, &Table::list_keys>,
      &Table::call<Op::kAppend, &Table::append>,
      &Table::call<Op::kMultiGet, &Table::multi_get>,
      &Table::call<Op::kMultiSet, &Table::multi_set>,
      &Table::call<Op::kQueuePush, &Table::queue_push>,
      &Table::call<Op::kQueuePop, &Table::queue_pop>,
      &Table::call<Op::kQueueLength, &Table::queue_len>,
      &Table::call<Op::kBarrier, &Table::barrier>,
      &Table::call<Op::kWorkers, &Table::workers>,
      &Table::call<Op::kCancel, &Table::cancel_request>,
      &Table::call<Op::kGetUnless, &Table::get_unless>,
      &Table::call<Op::kSetOnDisconnect, &Table::set_on_disconnect>,
      &Table::call<Op::kWithdrawOnDisconnect, &Table::withdraw_on_disconnect>,
  };
  if (waits_.contains(ticket)) throw ProtocolError{"a request number that is still in use"};
  const size_t row = static_cast<size_t>(op) - 1;
  if (row >= kHandlers.size()) throw ProtocolError{"an unknown operation " + std::to_string(static_cast<int>(op))};
  (this->*kHandlers[row])(ticket, body);
}

Table::Entry* Table::find(const std::string& key) {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

void Table::put_value(const std::string& key, Value value) {
  entries_[key].value = std::move(value);
  ++changes_;
  wake(key);
}

void Table::set(Ticket ticket, const std::string& key, std::string_view value) {
  put_value(key, make_value(value));
  reply(ticket);
}

// The most frequent request of a start-up: allocates no list of keys unless it waits.
void Table::get(Ticket ticket, std::string key) {
  if (const Entry* entry = find(key); entry && entry->value) return deliver_(ticket, bare(entry->value));
  wait_for_keys(ticket, Op::kGet, {std::move(key)});
}

void Table::wait(Ticket ticket, std::vector<std::string> keys) { wait_for_keys(ticket, Op::kWait, std::move(keys)); }

void Table::multi_get(Ticket ticket, std::vector<std::string> keys) {
  wait_for_keys(ticket, Op::kMultiGet, std::move(keys));
}

void Table::add(Ticket ticket, const std::string& key, int64_t amount) {
  int64_t number = 0;
  if (const Entry* entry = find(key); entry && entry->value) {
    const std::string& text = *entry->value;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) {
      return fail(ticket, "add: key " + quoted(key) + " holds a value that is not a decimal number of 64 bits");
    }
  }
  if (__builtin_add_overflow(number, amount, &number)) {
    return fail(ticket, "add: the sum at key " + quoted(key) + " does not fit in 64 bits");
  }
  put_value(key, make_value(std::to_string(number)));
  reply(ticket, as_bytes(static_cast<uint64_t>(number)));
}

void Table::check(Ticket ticket, const std::vector<std::string>& keys) {
  reply(ticket, as_byte(std::all_of(keys.begin(), keys.end(), [this](const auto& key) { return find(key); })));
}

void Table::compare_set(Ticket ticket, const std::string& key, std::string_view expected, std::string_view desired) {
  const Entry* entry = find(key);
  const bool present = entry && entry->value;
  const bool matches = present ? *entry->value == expected : expected.empty();
  if (!matches) return deliver_(ticket, bare(present ? entry->value : make_value(expected)));
  const Value value = make_value(desired);
  put_value(key, value);
  deliver_(ticket, bare(value));
}

void Table::delete_key(Ticket ticket, const std::string& key) {
  const bool existed = entries_.erase(key) > 0;
  changes_ += existed;
  reply(ticket, as_byte(existed));
}

void Table::num_keys(Ticket ticket) { reply(ticket, as_bytes(entries_.size())); }

void Table::list_keys(Ticket ticket, const std::string& prefix) {
  std::string keys;
  for (const auto& [key, entry] : entries_) {
    if (key.starts_with(prefix)) put_field(keys, key);
    if (keys.size() > kMaxFrameBytes) return fail(ticket, "list_keys: too many keys for one reply; give a prefix");
  }
  reply(ticket, std::move(keys));
}

void Table::append(Ticket ticket, const std::string& key, std::string_view tail) {
  const Entry* entry = find(key);
  std::string joined = entry && entry->value ? *entry->value : std::string();
  if (joined.size() + tail.size() > kMaxValueBytes)
    return deliver_(ticket, StoreAnswer::too_large(joined.size() + tail.size()));
  joined.append(tail);
  put_value(key, std::make_shared<const std::string>(std::move(joined)));
  reply(ticket);
}

void Table::multi_set(Ticket ticket, const std::vector<std::string>& keys,
                      const std::vector<std::string_view>& values) {
  if (keys.size() != values.size()) throw ProtocolError{"a request with as many values as keys was expected"};
  for (size_t i = 0; i < keys.size(); ++i) put_value(keys[i], make_value(values[i]));
  reply(ticket);
}

void Table::queue_push(Ticket ticket, const std::string& key, std::string_view value) {
  entries_[key].queue.push_back(make_value(value));
  ++changes_;
  reply(ticket);
  wake(key);
}

void Table::queue_pop(Ticket ticket, std::string key, bool block) {
  const Entry* entry = find(key);
  if (!block && (!entry || entry->queue.empty())) return deliver_(ticket, StoreAnswer{Status::kQueueEmpty, {}, {}});
  wait_for_keys(ticket, Op::kQueuePop, {std::move(key)});
}

void Table::queue_len(Ticket ticket, const std::string& key) {
  const Entry* entry = find(key);
  reply(ticket, as_bytes(entry ? entry->queue.size() : 0));
}

void Table::barrier(Ticket ticket, const std::string& key, uint64_t world_size) {
  std::list<Ticket>& waiters = barriers_[key];
  if (!waiters.empty() && waits_.at(waiters.front()).count != world_size) {
    return fail(ticket, "barrier " + quoted(key) + ": others wait in it with world size " +
                            std::to_string(waits_.at(waiters.front()).count) + ", this call said " +
                            std::to_string(world_size));
  }
  Wait wait{Op::kBarrier, {key}, 0, world_size, {}, {}};
  wait.position = waiters.insert(waiters.end(), ticket);
  waits_.emplace(ticket, std::move(wait));
  ++changes_;
  if (waiters.size() < world_size) return;
  const std::list<Ticket> arrived = std::move(waiters);
  barriers_.erase(key);
  for (const Ticket each : arrived) {
    waits_.erase(each);
    reply(each);
  }
}

void Table::workers(Ticket ticket, uint64_t count) {
  Wait wait{Op::kWorkers, {}, 0, count, {}, {}};
  wait.position = worker_waiters_.insert(worker_waiters_.end(), ticket);
  waits_.emplace(ticket, std::move(wait));
  wake_workers();
}

void Table::get_unless(Ticket ticket, std::vector<std::string> keys, std::string unless) {
  Wait wait{Op::kGetUnless, std::move(keys), 0, 0, {}, std::move(unless)};
  if (satisfied(wait)) return answer_wait(ticket, wait);
  if (const Entry* entry = find(wait.unless); entry && entry->value) {
    return deliver_(ticket, StoreAnswer{Status::kUnless, {}, {entry->value}});
  }
  add_waiter(waits_.emplace(ticket, std::move(wait)).first);
}

void Table::set_on_disconnect(Ticket ticket, const std::string& key, std::string_view value) {
  std::map<std::string, Value>& keys = on_disconnect_[ticket.connection];
  if (keys.size() >= kMaxKeysOnDisconnect && !keys.contains(key)) {
    return fail(ticket, "set_on_disconnect: this connection has " + std::to_string(keys.size()) + " keys already");
  }
  keys[key] = make_value(value);
  reply(ticket);
}

void Table::withdraw_on_disconnect(Ticket ticket, const std::string& key) {
  if (const auto found = on_disconnect_.find(ticket.connection); found != on_disconnect_.end()) {
    found->second.erase(key);
    if (found->second.empty()) on_disconnect_.erase(found);
  }
  reply(ticket);
}

void Table::join(uint64_t client) {
  // Bounded by the number of connections, so that reconnecting clients cannot make it grow without end.
  if (workers_.size() < kMaxConnections) workers_.insert(client);
  wake_workers();
}

void Table::wake_workers() {
  for (auto position = worker_waiters_.begin(); position != worker_waiters_.end();) {
    const Ticket ticket = *position++;
    const auto wait = waits_.find(ticket);
    if (wait->second.count > workers_.size()) continue;
    remove_waiter(wait);
    waits_.erase(wait);
    reply(ticket, as_bytes(workers_.size()));
  }
}

// --- requests that wait: for keys, for the key that ends a kGetUnless, for workers, in barriers ---

// Whether the request need not wait for this key. kWait accepts a value or a queue, kQueuePop a queue, others a value.
bool Table::ready(const Wait& wait, const std::string& key) {
  const Entry* entry = find(key);
  if (!entry) return false;
  if (wait.op == Op::kQueuePop) return !entry->queue.empty();
  return wait.op == Op::kWait ? entry->exists() : entry->value != nullptr;
}

// Whether the request need not wait for any of its keys; moves `next` to the first missing key otherwise. A key that
// was deleted after an earlier check counts as missing, so that all values can be read when the result is true.
bool Table::satisfied(Wait& wait) {
  while (wait.next < wait.keys.size() && ready(wait, wait.keys[wait.next])) ++wait.next;
  if (wait.next < wait.keys.size()) return false;
  for (size_t i = 0; i < wait.keys.size(); ++i) {
    if (!ready(wait, wait.keys[i])) {
      wait.next = i;
      return false;
    }
  }
  return true;
}

void Table::wait_for_keys(Ticket ticket, Op op, std::vector<std::string> keys) {
  Wait wait{op, std::move(keys), 0, 0, {}, {}};
  if (satisfied(wait)) return answer_wait(ticket, wait);
  add_waiter(waits_.emplace(ticket, std::move(wait)).first);
}

std::list<Ticket>& Table::waiters_of(const Wait& wait) {
  if (wait.op == Op::kWorkers) return worker_waiters_;
  if (wait.op == Op::kBarrier) return barriers_[wait.keys.front()];
  return waiters_[wait.keys[wait.next]];
}

void Table::add_waiter(Waits::iterator wait) {
  if (wait->second.op == Op::kGetUnless) unless_[wait->second.unless].insert(wait->first);
  std::list<Ticket>& waiters = waiters_of(wait->second);
  wait->second.position = waiters.insert(waiters.end(), wait->first);
}

void Table::remove_waiter(Waits::iterator wait) {
  if (wait->second.op == Op::kGetUnless) {
    const auto ended_by = unless_.find(wait->second.unless);
    ended_by->second.erase(wait->first);
    if (ended_by->second.empty()) unless_.erase(ended_by);
  }
  std::list<Ticket>& waiters = waiters_of(wait->second);
  waiters.erase(wait->second.position);
  if (!waiters.empty() || wait->second.op == Op::kWorkers) return;
  if (wait->second.op == Op::kBarrier) {
    barriers_.erase(wait->second.keys.front());
  } else {
    waiters_.erase(wait->second.keys[wait->second.next]);
  }
}

void Table::answer_wait(Ticket ticket, Wait& wait) {
  StoreAnswer answer;
  if (wait.op == Op::kQueuePop) {
    const auto found = entries_.find(wait.keys.front());
    answer.values.push_back(std::move(found->second.queue.front()));
    found->second.queue.pop_front();
    ++changes_;
    if (!found->second.exists()) entries_.erase(found);
  } else if (wait.op != Op::kWait) {
    size_t total = 0;
    for (const std::string& key : wait.keys) {
      answer.values.push_back(find(key)->value);
      total += 4 + answer.values.back()->size();
    }
    answer.fields = wait.op == Op::kMultiGet || wait.op == Op::kGetUnless;
    if (total > kMaxFrameBytes) return deliver_(ticket, StoreAnswer::too_large(total));
  }
  deliver_(ticket, std::move(answer));
}

void Table::wake(const std::string& key) {
  if (!unless_.empty()) end_waits_unless(key);
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  // A copy: the loop removes requests from the list, and may append them to it again.
  const std::vector<Ticket> waiters(found->second.begin(), found->second.end());
  for (const Ticket ticket : waiters) {
    const auto wait = waits_.find(ticket);
    if (!ready(wait->second, key)) continue;
    remove_waiter(wait);
    if (!satisfied(wait->second)) {
      add_waiter(wait);
      continue;
    }
    Wait done = std::move(wait->second);
    waits_.erase(wait);
    answer_wait(ticket, done);
  }
}

// End the waits of kGetUnless requests for which this key is the ending one. A request for whose own keys this was
// the last is answered with their values.
void Table::end_waits_unless(const std::string& key) {
  const auto found = unless_.find(key);
  const Entry* entry = find(key);
  if (found == unless_.end() || !entry || !entry->value) return;
  const Value value = entry->value;
  const std::vector<Ticket> ended(found->second.begin(), found->second.end());
  for (const Ticket ticket : ended) {
    const auto wait = waits_.find(ticket);
    remove_waiter(wait);
    if (satisfied(wait->second)) {
      Wait done = std::move(wait->second);
      waits_.erase(wait);
      answer_wait(ticket, done);
      continue;
    }
    waits_.erase(wait);
    deliver_(ticket, StoreAnswer{Status::kUnless, {}, {value}});
  }
}

void Table::cancel(Ticket ticket) {
  const auto wait = waits_.find(ticket);
  if (wait == waits_.end()) return;
  StoreAnswer answer{Status::kCancelled, {}, {}};
  if (wait->second.op == Op::kWorkers) put(answer.text, workers_.size());
  changes_ += wait->second.op == Op::kBarrier;
  remove_waiter(wait);
  waits_.erase(wait);
  deliver_(ticket, std::move(answer));
}

void Table::forget(uint64_t connection) {
  for (auto wait = waits_.lower_bound({connection, 0}); wait != waits_.lower_bound({connection + 1, 0});) {
    remove_waiter(wait);
    wait = waits_.erase(wait);
  }
  const auto found = on_disconnect_.find(connection);
  if (found == on_disconnect_.end()) return;
  const std::map<std::string, Value> keys = std::move(found->second);
  on_disconnect_.erase(found);
  for (const auto& [key, value] : keys) {
    if (const Entry* entry = find(key); !entry || !entry->value) put_value(key, value);
  }
}

size_t Table::waits_of(uint64_t connection) const {
  return static_cast<size_t>(
      std::distance(waits_.lower_bound({connection, 0}), waits_.lower_bound({connection + 1, 0})));
}

}  // namespace procgroup::store
