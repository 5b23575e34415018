// After another backend has moved the bytes of a call, in a group that spans hosts: a rank goes on once it knows that
// the backend has succeeded on all ranks.
//
// A backend may report success although its bytes are wrong, because the process that it read from was killed
// meanwhile. The ranks of that process's host see that. Those of other hosts, to whom wrong bytes may have been passed
// on, only learn it in time where every rank confirms that it has seen no loss.
//
// In round k every rank sends an empty message to the rank 2^k places above, and waits for one from the rank 2^k places
// below. After ceil(log2 p) rounds it knows, directly or through others, of all p ranks: the dissemination barrier
// (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "collectives/state.hpp"
#include "messages/transfer.hpp"

namespace procgroup {

class Confirmation {
 public:
  explicit Confirmation(uint64_t sequence) : sequence_(sequence) {}

  // Send and receive as far as possible; kDone once all ranks have confirmed, or when one will not. Under the mutex
  // that guards Messages, as cancel().
  Progress advance(const GroupMessages& through);
  // The failure that ended the exchange, with group ranks; null if there is none.
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }
  // Cancel the pending receive.
  void cancel(const GroupMessages& through);
  // The group rank that is waited for; -1 before the first round and after the last one.
  int awaited() const { return awaited_; }

 private:
  const uint64_t sequence_;  // of the call
  int distance_ = 1;         // 2^k in round k
  int awaited_ = -1;
  std::shared_ptr<Transfer> receive_;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
