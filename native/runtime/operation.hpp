// One issued call on this rank, in a form that can be advanced a little at a time by any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "runtime/failure.hpp"

namespace procgroup {

// The progress of several operations is the largest one.
enum class Progress {
  kDone,     // completed, with or without a failure
  kWaiting,  // nothing can be done before another rank acts
  kMoved,    // something was done; call again
};

// The longest sleep of a waiter between two looks. Other ranks wake it when they have moved something; nothing wakes it
// for what another backend moves (kTaskSleepNs).
inline constexpr int64_t kAnySleepNs = INT64_MAX;

class Operation {
 public:
  virtual ~Operation() = default;

  // Do what can be done now, without ever waiting. One thread at a time.
  virtual Progress advance() = 0;

  // As advance(), from a thread that waits; does nothing where only the progress thread may advance it.
  virtual Progress help() { return advance(); }

  // Group ranks that this operation is waiting for now (for error texts; may be approximate).
  virtual std::vector<int> missing() const = 0;

  virtual int64_t longest_sleep_ns() const { return kAnySleepNs; }

  // A number that changes whenever this rank has moved elements of this operation.
  virtual uint64_t moved() const { return 0; }

  // Whether the loss of any member makes this operation fail. A message fails with its peer only.
  virtual bool depends_on_all() const { return true; }
  // Whether a peer may leave in order before this operation ends: it has done its part.
  virtual bool outlives_peer() const { return false; }
  // Whether the ranks of missing() may wait for others in turn, so that a stopped rank is more likely the cause.
  virtual bool waits_in_chain() const { return false; }

  // A thread that waits for the end of this operation, until the end of the scope.
  class Awaiting {
   public:
    explicit Awaiting(Operation& operation) : operation_(operation) {
      operation_.waiters_.fetch_add(1, std::memory_order_relaxed);
    }
    Awaiting(const Awaiting&) = delete;
    Awaiting& operator=(const Awaiting&) = delete;
    ~Awaiting() { operation_.waiters_.fetch_sub(1, std::memory_order_relaxed); }

   private:
    Operation& operation_;
  };
  bool is_awaited() const { return waiters_.load(std::memory_order_relaxed) > 0; }

  bool is_completed() const { return completed_.load(std::memory_order_acquire); }
  const Failure* failure() const { return failure_.get(); }

  // End the operation from outside. Its arrays are not read or written afterwards.
  virtual void give_up(Failure failure) { fail(std::move(failure)); }

  void finish() { completed_.store(true, std::memory_order_release); }
  void fail(Failure failure) {
    failure_ = std::make_unique<Failure>(std::move(failure));
    completed_.store(true, std::memory_order_release);
  }

 private:
  std::unique_ptr<const Failure> failure_;  // few fail: those that do not stay small
  std::atomic<bool> completed_{false};
  std::atomic<int> waiters_{0};
};

}  // namespace procgroup
