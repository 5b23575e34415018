// The waiting requests of a table: for keys, for the key that ends a kGetUnless, for workers, in barriers.
#include <iterator>

#include "store/table.hpp"

namespace procgroup::store {

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
  Answer answer;
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
    if (total > kMaxFrameBytes) return deliver_(ticket, Answer::too_large(total));
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
    deliver_(ticket, Answer{Status::kUnless, {}, {value}});
  }
}

void Table::cancel(Ticket ticket) {
  const auto wait = waits_.find(ticket);
  if (wait == waits_.end()) return;
  Answer answer{Status::kCancelled, {}, {}};
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
