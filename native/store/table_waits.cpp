// The requests of a table that wait: for keys, for a key that ends them, for each other in a barrier.
#include "store/table.hpp"

namespace procgroup::store {

// Whether this key no longer keeps that request waiting. A queue counts for wait(), a value only for get().
bool Table::ready(const Wait& wait, const std::string& key) {
  const Entry* entry = find(key);
  if (!entry) return false;
  if (wait.op == Op::kQueuePop) return !entry->queue.empty();
  return wait.op == Op::kWait ? entry->exists() : entry->value != nullptr;
}

// Moves `next` to the first key that is missing. A key that was deleted again after it had been seen counts
// as missing, so that values can be read when this says yes.
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
  stand_in_line(waits_.emplace(ticket, std::move(wait)).first);
}

std::list<Ticket>& Table::line_of(const Wait& wait) {
  if (wait.op == Op::kWorkers) return workers_line_;
  if (wait.op == Op::kBarrier) return barriers_[wait.keys.front()];
  return lines_[wait.keys[wait.next]];
}

void Table::stand_in_line(Waits::iterator wait) {
  if (wait->second.op == Op::kGetUnless) unless_[wait->second.unless].insert(wait->first);
  std::list<Ticket>& line = line_of(wait->second);
  wait->second.place = line.insert(line.end(), wait->first);
}

void Table::leave_line(Waits::iterator wait) {
  if (wait->second.op == Op::kGetUnless) {
    const auto ended_by = unless_.find(wait->second.unless);
    ended_by->second.erase(wait->first);
    if (ended_by->second.empty()) unless_.erase(ended_by);
  }
  std::list<Ticket>& line = line_of(wait->second);
  line.erase(wait->second.place);
  if (!line.empty() || wait->second.op == Op::kWorkers) return;
  if (wait->second.op == Op::kBarrier) {
    barriers_.erase(wait->second.keys.front());
  } else {
    lines_.erase(wait->second.keys[wait->second.next]);
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
  const auto found = lines_.find(key);
  if (found == lines_.end()) return;
  // Requests leave this line and may enter it again, behind those that are still to be looked at.
  const std::vector<Ticket> line(found->second.begin(), found->second.end());
  for (const Ticket ticket : line) {
    const auto wait = waits_.find(ticket);
    if (!ready(wait->second, key)) continue;
    leave_line(wait);
    if (!satisfied(wait->second)) {
      stand_in_line(wait);
      continue;
    }
    Wait done = std::move(wait->second);
    waits_.erase(wait);
    answer_wait(ticket, done);
  }
}

// A request that also waits for this key, as its last one, is answered with its values instead.
void Table::end_waits_unless(const std::string& key) {
  const auto found = unless_.find(key);
  const Entry* entry = find(key);
  if (found == unless_.end() || !entry || !entry->value) return;
  const Value value = entry->value;
  const std::vector<Ticket> ended(found->second.begin(), found->second.end());
  for (const Ticket ticket : ended) {
    const auto wait = waits_.find(ticket);
    leave_line(wait);
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
  leave_line(wait);
  waits_.erase(wait);
  deliver_(ticket, std::move(answer));
}

void Table::forget(uint64_t connection) {
  auto wait = waits_.lower_bound({connection, 0});
  while (wait != waits_.end() && wait->first.connection == connection) {
    leave_line(wait);
    wait = waits_.erase(wait);
  }
  const auto found = on_disconnect_.find(connection);
  if (found == on_disconnect_.end()) return;
  const std::map<std::string, Value> keys = std::move(found->second);
  on_disconnect_.erase(found);
  for (const auto& [key, value] : keys) {
    if (const Entry* entry = find(key); !entry || !entry->value) set(key, value);
  }
}

size_t Table::waits_of(uint64_t connection) const {
  size_t count = 0;
  for (auto wait = waits_.lower_bound({connection, 0}); wait != waits_.end() && wait->first.connection == connection;
       ++wait) {
    ++count;
  }
  return count;
}

}  // namespace procgroup::store
