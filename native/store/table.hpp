// The state of a key-value store: keys, queues, barriers, and the requests that wait for them. No sockets, no locks.
//
// The server (server.hpp), the store inside a process (in_process_store.hpp) and the store on a file (which replays its
// log) all run their requests on a Table, so the semantics of a request exist here only.
//
// A waiting request is in exactly one list of waiters: that of the first of its keys that is missing. When that key
// appears, the request moves to the list of its next missing key, or is answered. Lists are served in order of
// arrival, which makes queue_pop fair. A request that another key ends too (kGetUnless) is also registered under that
// key; if all of its own keys exist by then, their values are the answer.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/requests.hpp"

namespace procgroup::store {

// Shared, so that a value that is still being sent is not copied.
using Value = std::shared_ptr<const std::string>;
inline Value make_value(std::string_view bytes) { return std::make_shared<const std::string>(bytes); }

// Identifies a request: its connection, and the connection's number for it.
struct Ticket {
  uint64_t connection;
  uint32_t request;
  auto operator<=>(const Ticket&) const = default;
};

// The reply to a request, before its values are copied into one body.
struct StoreAnswer {
  Status status = Status::kOk;
  std::string text;           // the body, when there are no values
  std::vector<Value> values;  // the body: one value bare, or several as fields when `fields`
  bool fields = false;

  static StoreAnswer too_large(size_t size) {
    StoreAnswer answer{Status::kTooLarge, {}, {}};
    put(answer.text, size);
    return answer;
  }
  // The answer in one piece, for a caller in the same process.
  Reply to_reply() const;
};

class Table {
 public:
  using Deliver = std::function<void(Ticket, StoreAnswer&&)>;

  // Every answer is passed to `deliver`, also the answers to waiting requests that another request ends.
  explicit Table(Deliver deliver) : deliver_(std::move(deliver)) {}

  // Run one request. Throws ProtocolError, and changes nothing, for a body that does not fit the request's row.
  void run(Ticket ticket, Op op, std::string_view body);
  // Answer kCancelled to the request if it still waits.
  void cancel(Ticket ticket);
  // Drop the connection's waiting requests without an answer, and set the keys of its kSetOnDisconnect requests.
  void forget(uint64_t connection);
  // Count the client among the workers that kWorkers waits for.
  void join(uint64_t client);
  size_t waits_of(uint64_t connection) const;
  // How many requests have changed a key, a queue or a barrier; waits for keys do not count.
  uint64_t changes() const { return changes_; }

 private:
  struct Wait {
    Op op;
    std::vector<std::string> keys;  // kWorkers: none
    size_t next = 0;                // all keys before this one existed when they were last checked
    uint64_t count = 0;             // kBarrier: world size; kWorkers: how many
    std::list<Ticket>::iterator position;
    std::string unless;  // kGetUnless: the key that ends it
  };
  using Waits = std::map<Ticket, Wait>;
  struct Entry {
    Value value;              // null: no value
    std::deque<Value> queue;  // values that were pushed
    bool exists() const { return value || !queue.empty(); }
  };

  // The handlers of requests, which get the parameters of the request's row (requests.hpp).
  void set(Ticket ticket, const std::string& key, std::string_view value);
  void get(Ticket ticket, std::string key);
  void wait(Ticket ticket, std::vector<std::string> keys);
  void add(Ticket ticket, const std::string& key, int64_t amount);
  void check(Ticket ticket, const std::vector<std::string>& keys);
  void compare_set(Ticket ticket, const std::string& key, std::string_view expected, std::string_view desired);
  void delete_key(Ticket ticket, const std::string& key);
  void num_keys(Ticket ticket);
  void list_keys(Ticket ticket, const std::string& prefix);
  void append(Ticket ticket, const std::string& key, std::string_view tail);
  void multi_get(Ticket ticket, std::vector<std::string> keys);
  void multi_set(Ticket ticket, const std::vector<std::string>& keys, const std::vector<std::string_view>& values);
  void queue_push(Ticket ticket, const std::string& key, std::string_view value);
  void queue_pop(Ticket ticket, std::string key, bool block);
  void queue_len(Ticket ticket, const std::string& key);
  void barrier(Ticket ticket, const std::string& key, uint64_t world_size);
  void workers(Ticket ticket, uint64_t count);
  void cancel_request(Ticket ticket, uint32_t request) { cancel({ticket.connection, request}); }
  void get_unless(Ticket ticket, std::vector<std::string> keys, std::string unless);
  void set_on_disconnect(Ticket ticket, const std::string& key, std::string_view value);
  void withdraw_on_disconnect(Ticket ticket, const std::string& key);
  template <Op op, auto handler>
  void call(Ticket ticket, std::string_view body);

  void put_value(const std::string& key, Value value);
  Entry* find(const std::string& key);
  bool ready(const Wait& wait, const std::string& key);
  void wait_for_keys(Ticket ticket, Op op, std::vector<std::string> keys);
  bool satisfied(Wait& wait);
  void add_waiter(Waits::iterator wait);
  void remove_waiter(Waits::iterator wait);
  void answer_wait(Ticket ticket, Wait& wait);
  void wake(const std::string& key);
  void end_waits_unless(const std::string& key);
  void wake_workers();
  std::list<Ticket>& waiters_of(const Wait& wait);
  void reply(Ticket ticket, std::string text = {}) { deliver_(ticket, StoreAnswer{Status::kOk, std::move(text), {}}); }
  void fail(Ticket ticket, std::string text) { deliver_(ticket, StoreAnswer{Status::kError, std::move(text), {}}); }

  Deliver deliver_;
  uint64_t changes_ = 0;
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<std::string, std::list<Ticket>> waiters_;   // by the key that is missing
  std::unordered_map<std::string, std::list<Ticket>> barriers_;  // by the barrier's key
  std::unordered_map<std::string, std::set<Ticket>> unless_;     // waits by the key that ends them
  // By connection: what to set when it ends.
  std::unordered_map<uint64_t, std::map<std::string, Value>> on_disconnect_;
  std::list<Ticket> worker_waiters_;
  std::unordered_set<uint64_t> workers_;
  Waits waits_;
};

}  // namespace procgroup::store
