// What the server knows: keys, queues, barriers, and the requests that wait for them. No sockets.
//
// A waiting request stands in exactly one line: that of the first of its keys that is missing. When
// that key appears, the request moves on to its next missing key, or is answered. Lines are
// first come, first served, which makes queue_pop fair. A request that another key ends as well
// (kGetUnless) is also registered under that key; when all of its own keys are there, they count.
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

#include "store/request.hpp"

namespace procgroup::store {

// Shared, so that a reply that is still being sent costs no copy.
using Value = std::shared_ptr<const std::string>;

struct Ticket {
  uint64_t connection;
  uint32_t request;
  auto operator<=>(const Ticket&) const = default;
};

struct Answer {
  Status status = Status::kOk;
  std::string text;           // the body, when there are no values
  std::vector<Value> values;  // the body: one value bare, or several as fields when `fields`
  bool fields = false;

  static Answer too_large(size_t size) {
    Answer answer{Status::kTooLarge, {}, {}};
    put(answer.text, size);
    return answer;
  }
  // The answer in one piece, for a caller in the same process.
  Reply to_reply() const;
};

class Table {
 public:
  using Deliver = std::function<void(Ticket, Answer&&)>;

  // `deliver` is given every answer, also those of other requests that this one satisfies.
  explicit Table(Deliver deliver) : deliver_(std::move(deliver)) {}

  // Run one request. Throws ProtocolError for a body that is not what its op says; the table is then unchanged.
  void run(Ticket ticket, Op op, std::string_view body);
  // Answer kCancelled to that request if it is still waiting.
  void cancel(Ticket ticket);
  // Its waiting requests are over, unanswered; then the keys are set that were to be set when it ends.
  void forget(uint64_t connection);
  // A client joins those that kWorkers counts.
  void join(uint64_t client);
  size_t waits_of(uint64_t connection) const;
  // How many requests have changed a key, a queue or a barrier; waits for keys do not count.
  uint64_t changes() const { return changes_; }

 private:
  struct Wait {
    Op op;
    std::vector<std::string> keys;  // kWorkers: none
    size_t next = 0;                // keys before this one have been seen
    uint64_t count = 0;             // kBarrier: world size; kWorkers: how many
    std::list<Ticket>::iterator place;
    std::string unless;  // kGetUnless: the key that ends it
  };
  using Waits = std::map<Ticket, Wait>;
  struct Entry {
    Value value;              // null: no value
    std::deque<Value> queue;  // values that were pushed
    bool exists() const { return value || !queue.empty(); }
  };

  void set(std::string_view key, Value value);
  void add(Ticket ticket, BodyReader& body);
  void check(Ticket ticket, BodyReader& body);
  void compare_set(Ticket ticket, BodyReader& body);
  void list_keys(Ticket ticket, BodyReader& body);
  void append(Ticket ticket, BodyReader& body);
  void multi_set(Ticket ticket, BodyReader& body);
  void queue_push(Ticket ticket, BodyReader& body);
  void queue_pop(Ticket ticket, BodyReader& body);
  void barrier(Ticket ticket, BodyReader& body);
  void workers(Ticket ticket, BodyReader& body);
  void get_unless(Ticket ticket, BodyReader& body);
  void set_on_disconnect(Ticket ticket, BodyReader& body);

  Entry* find(const std::string& key);
  bool ready(const Wait& wait, const std::string& key);
  void wait_for_keys(Ticket ticket, Op op, std::vector<std::string> keys);
  bool satisfied(Wait& wait);
  void stand_in_line(Waits::iterator wait);
  void leave_line(Waits::iterator wait);
  void answer_wait(Ticket ticket, Wait& wait);
  void wake(const std::string& key);
  void end_waits_unless(const std::string& key);
  void wake_workers();
  std::list<Ticket>& line_of(const Wait& wait);
  void reply(Ticket ticket, std::string text = {}) { deliver_(ticket, Answer{Status::kOk, std::move(text), {}}); }
  void fail(Ticket ticket, std::string text) { deliver_(ticket, Answer{Status::kError, std::move(text), {}}); }

  Deliver deliver_;
  uint64_t changes_ = 0;
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<std::string, std::list<Ticket>> lines_;     // by the key that is missing
  std::unordered_map<std::string, std::list<Ticket>> barriers_;  // by the barrier's key
  std::unordered_map<std::string, std::set<Ticket>> unless_;     // waits by the key that ends them
  // By connection: what to set when it ends.
  std::unordered_map<uint64_t, std::map<std::string, Value>> on_disconnect_;
  std::list<Ticket> workers_line_;
  std::unordered_set<uint64_t> workers_;
  Waits waits_;
};

}  // namespace procgroup::store
