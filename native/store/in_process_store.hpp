// A key-value store for the threads of one process: a Table behind a lock, without a server.
//
// A request that waits blocks its own thread on a condition variable of its own, so that a change wakes exactly the
// threads whose requests it answers. A forked child has a copy of the table that no other process sees, perhaps
// half changed and with its lock held: there every request throws ForkedStore, and nothing is destroyed.
#pragma once

#include <atomic>
#include <memory>

#include "base/clock.hpp"
#include "store/requests.hpp"

namespace procgroup::store {

// The store was used in a forked child of the process that made it.
struct ForkedStore {};
// The store was closed.
struct ClosedStore {};

class InProcessStore {
 public:
  // `slice_ns`: how long a wait lasts between two calls of its `check`.
  explicit InProcessStore(int64_t slice_ns = 100'000'000);
  ~InProcessStore();
  InProcessStore(const InProcessStore&) = delete;
  InProcessStore& operator=(const InProcessStore&) = delete;

  // Run one request, whose body is `head` followed by `tail`, and wait for its reply; kCancelled when the deadline
  // passes first. `check` is called without the store's lock. Throws ForkedStore, ClosedStore, ProtocolError for a
  // malformed body, or what `check` throws; the request is then cancelled.
  Reply request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check);

  // Return another store with the same keys, to be closed on its own. Throws ForkedStore or ClosedStore.
  std::unique_ptr<InProcessStore> clone() const;
  // Let later requests throw ClosedStore. Requests that wait go on. Idempotent.
  void close() { closed_.store(true, std::memory_order_release); }

 private:
  struct State;
  class Call;

  explicit InProcessStore(std::shared_ptr<State> state);
  void check_usable() const;

  std::shared_ptr<State> state_;
  std::atomic<bool> closed_{false};
};

}  // namespace procgroup::store
