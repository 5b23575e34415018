#include "store/table.hpp"

#include <charconv>

namespace procgroup::store {
namespace {

std::vector<std::string> take_keys(BodyReader& body) {
  std::vector<std::string> keys;
  while (!body.at_end()) {
    if (keys.size() == kMaxKeysPerRequest) throw ProtocolError{"a request with too many keys"};
    keys.emplace_back(body.take_key());
  }
  return keys;
}

Value take_value(BodyReader& body) {
  const std::string_view bytes = body.take_field();
  if (bytes.size() > kMaxValueBytes) throw ProtocolError{"a value of " + std::to_string(bytes.size()) + " bytes"};
  return std::make_shared<const std::string>(bytes);
}

std::string as_bytes(uint64_t number) {
  std::string bytes;
  put(bytes, number);
  return bytes;
}

std::string quoted(const std::string& key) { return "'" + key + "'"; }

Answer bare(const Value& value) { return Answer{Status::kOk, {}, {value}}; }

}  // namespace

Reply Answer::to_reply() const {
  Reply reply{status, text};
  for (const Value& value : values) {
    if (fields) put_length(reply.body, value->size());
    reply.body.append(*value);
  }
  return reply;
}

void Table::run(Ticket ticket, Op op, std::string_view bytes) {
  if (waits_.contains(ticket)) throw ProtocolError{"a request number that is still in use"};
  BodyReader body(bytes);
  switch (op) {
    case Op::kSet: {
      const std::string_view key = body.take_key();
      const Value value = take_value(body);
      body.finish();
      set(key, value);
      return reply(ticket);
    }
    case Op::kGet: {
      // The most frequent request of a start-up: allocate no list of keys unless it waits.
      std::string key(body.take_key());
      body.finish();
      if (Entry* entry = find(key); entry && entry->value) return deliver_(ticket, bare(entry->value));
      return wait_for_keys(ticket, op, {std::move(key)});
    }
    case Op::kWait:
    case Op::kMultiGet:
      return wait_for_keys(ticket, op, take_keys(body));
    case Op::kAdd:
      return add(ticket, body);
    case Op::kCheck:
      return check(ticket, body);
    case Op::kCompareSet:
      return compare_set(ticket, body);
    case Op::kDelete: {
      const std::string key(body.take_key());
      body.finish();
      const bool existed = entries_.erase(key) > 0;
      changes_ += existed;
      return reply(ticket, std::string(1, existed ? '\1' : '\0'));
    }
    case Op::kNumKeys:
      body.finish();
      return reply(ticket, as_bytes(entries_.size()));
    case Op::kListKeys:
      return list_keys(ticket, body);
    case Op::kAppend:
      return append(ticket, body);
    case Op::kMultiSet:
      return multi_set(ticket, body);
    case Op::kQueuePush:
      return queue_push(ticket, body);
    case Op::kQueuePop:
      return queue_pop(ticket, body);
    case Op::kQueueLength: {
      const Entry* entry = find(std::string(body.take_key()));
      body.finish();
      return reply(ticket, as_bytes(entry ? entry->queue.size() : 0));
    }
    case Op::kBarrier:
      return barrier(ticket, body);
    case Op::kWorkers:
      return workers(ticket, body);
    case Op::kGetUnless:
      return get_unless(ticket, body);
    case Op::kSetOnDisconnect:
      return set_on_disconnect(ticket, body);
    case Op::kWithdrawOnDisconnect: {
      const std::string key(body.take_key());
      body.finish();
      if (const auto found = on_disconnect_.find(ticket.connection); found != on_disconnect_.end()) {
        found->second.erase(key);
        if (found->second.empty()) on_disconnect_.erase(found);
      }
      return reply(ticket);
    }
    case Op::kCancel: {
      const auto request = body.take<uint32_t>();
      body.finish();
      return cancel({ticket.connection, request});
    }
  }
  throw ProtocolError{"an unknown operation " + std::to_string(static_cast<int>(op))};
}

Table::Entry* Table::find(const std::string& key) {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

void Table::set(std::string_view key, Value value) {
  const std::string name(key);
  entries_[name].value = std::move(value);
  ++changes_;
  wake(name);
}

void Table::add(Ticket ticket, BodyReader& body) {
  const std::string key(body.take_key());
  const auto amount = body.take<int64_t>();
  body.finish();
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
  set(key, std::make_shared<const std::string>(std::to_string(number)));
  reply(ticket, as_bytes(static_cast<uint64_t>(number)));
}

void Table::check(Ticket ticket, BodyReader& body) {
  for (const std::string& key : take_keys(body)) {
    if (!find(key)) return reply(ticket, std::string(1, '\0'));
  }
  reply(ticket, "\1");
}

void Table::compare_set(Ticket ticket, BodyReader& body) {
  const std::string key(body.take_key());
  const Value expected = take_value(body);
  const Value desired = take_value(body);
  body.finish();
  const Entry* entry = find(key);
  const bool present = entry && entry->value;
  const bool matches = present ? *entry->value == *expected : expected->empty();
  if (!matches) return deliver_(ticket, bare(present ? entry->value : expected));
  set(key, desired);
  deliver_(ticket, bare(desired));
}

void Table::list_keys(Ticket ticket, BodyReader& body) {
  const std::string_view prefix = body.take_key();
  body.finish();
  std::string keys;
  for (const auto& [key, entry] : entries_) {
    if (std::string_view(key).starts_with(prefix)) put_field(keys, key);
    if (keys.size() > kMaxFrameBytes) return fail(ticket, "list_keys: too many keys for one reply; give a prefix");
  }
  reply(ticket, std::move(keys));
}

void Table::append(Ticket ticket, BodyReader& body) {
  const std::string_view key = body.take_key();
  const std::string_view tail = body.take_field();
  body.finish();
  const Entry* entry = find(std::string(key));
  std::string joined = entry && entry->value ? *entry->value : std::string();
  if (joined.size() + tail.size() > kMaxValueBytes)
    return deliver_(ticket, Answer::too_large(joined.size() + tail.size()));
  joined.append(tail);
  set(key, std::make_shared<const std::string>(std::move(joined)));
  reply(ticket);
}

void Table::multi_set(Ticket ticket, BodyReader& body) {
  std::vector<std::pair<std::string_view, Value>> pairs;
  while (!body.at_end()) {
    if (pairs.size() == kMaxKeysPerRequest) throw ProtocolError{"a request with too many keys"};
    const std::string_view key = body.take_key();
    pairs.emplace_back(key, take_value(body));
  }
  for (auto& [key, value] : pairs) set(key, std::move(value));
  reply(ticket);
}

void Table::queue_push(Ticket ticket, BodyReader& body) {
  const std::string key(body.take_key());
  Value value = take_value(body);
  body.finish();
  entries_[key].queue.push_back(std::move(value));
  ++changes_;
  reply(ticket);
  wake(key);
}

void Table::queue_pop(Ticket ticket, BodyReader& body) {
  std::string key(body.take_key());
  const bool block = body.take<uint8_t>() != 0;
  body.finish();
  const Entry* entry = find(key);
  if (!block && (!entry || entry->queue.empty())) return deliver_(ticket, Answer{Status::kQueueEmpty, {}, {}});
  wait_for_keys(ticket, Op::kQueuePop, {std::move(key)});
}

void Table::barrier(Ticket ticket, BodyReader& body) {
  std::string key(body.take_key());
  const auto world_size = body.take<uint64_t>();
  body.finish();
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

void Table::workers(Ticket ticket, BodyReader& body) {
  const auto count = body.take<uint64_t>();
  body.finish();
  Wait wait{Op::kWorkers, {}, 0, count, {}, {}};
  wait.position = worker_waiters_.insert(worker_waiters_.end(), ticket);
  waits_.emplace(ticket, std::move(wait));
  wake_workers();
}

void Table::get_unless(Ticket ticket, BodyReader& body) {
  std::string unless(body.take_key());
  Wait wait{Op::kGetUnless, take_keys(body), 0, 0, {}, std::move(unless)};
  if (satisfied(wait)) return answer_wait(ticket, wait);
  if (const Entry* entry = find(wait.unless); entry && entry->value) {
    return deliver_(ticket, Answer{Status::kUnless, {}, {entry->value}});
  }
  add_waiter(waits_.emplace(ticket, std::move(wait)).first);
}

void Table::set_on_disconnect(Ticket ticket, BodyReader& body) {
  const std::string key(body.take_key());
  Value value = take_value(body);
  body.finish();
  std::map<std::string, Value>& keys = on_disconnect_[ticket.connection];
  if (keys.size() >= kMaxKeysOnDisconnect && !keys.contains(key)) {
    return fail(ticket, "set_on_disconnect: this connection has " + std::to_string(keys.size()) + " keys already");
  }
  keys[key] = std::move(value);
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

}  // namespace procgroup::store
