// How a rank waits for an operation: spin, then yield or sleep; always with a deadline.
//
//     holding the language's lock   about 2 us of polling, by the callers of wait(): giving the lock away can cost
//                                   100 times that
//     spinning                      some times as long as a sleep and a wake would take, when every rank has a core,
//                                   and as long as a peer takes to copy what a large call moves
//     yielding                      instead of spinning, when ranks outnumber the usable cores: for a shorter time,
//                                   or until a few yields have let other threads run
//     sleeping                      on the process's doorbell or its sockets, in slices short enough for
//                                   deadlines, lost peers and Ctrl-C
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/clock.hpp"
#include "runtime/failure.hpp"
#include "runtime/language_runtime.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

// Looks of about 2 us together, between which a caller may pause with the language's lock held.
inline constexpr int kHeldPolls = 40;

struct WaitPolicy {
  bool oversubscribed = false;  // ranks outnumber usable cores: yield, do not spin
  bool core_to_spare = true;    // each rank has another usable core, for its progress thread
  bool hold_lock = true;        // false when ranks are threads of one process
  // How long to poll before a sleep. A yield that returns at once does not show that an oversubscribed rank's core is
  // free: it gives the core only to threads of the same scheduling group, as a session or a container is one.
  static constexpr int64_t kSpinNs = 500'000;
  static constexpr int64_t kYieldNs = 30'000;
  int64_t spin_ns = kSpinNs;
  // An oversubscribed rank sleeps earlier, after so many yields that let another thread run. The awaited rank is often
  // the next one on this core, but a thread that only polls takes the core from those that copy.
  int switches = 8;
  // How long a waiter polls something that moves before it looks at what else may end its wait. Moves are no proof that
  // the awaited rank lives, because other traffic moves, too.
  int64_t slice_ns = 50'000'000;
  // The progress thread advances the awaited operation, too, and wakes this waiter at its end.
  bool is_helping = false;

  int held_polls() const { return hold_lock && !oversubscribed ? kHeldPolls : 0; }
  // For a call of so many bytes: a peer that copies them keeps this rank waiting longer than spin_ns, and a wake would
  // add to that (16 MiB, sent and received: 1.32 ms with a sleep, 1.23 without).
  WaitPolicy for_bytes(size_t bytes) const {
    WaitPolicy policy = *this;
    policy.spin_ns += static_cast<int64_t>(std::min(bytes, kAwaitedBytes) / kCopiedBytesPerNs);
    return policy;
  }

 private:
  static constexpr size_t kCopiedBytesPerNs = 10;
  static constexpr size_t kAwaitedBytes = size_t{20} << 20;  // 2 ms: a wake counts for little beside longer ones
};

// What one wait may spend: polls before each sleep, moves before each look, its time limit, and a last extension.
class WaitBudget {
 public:
  explicit WaitBudget(const WaitPolicy& policy, Deadline deadline = Deadline::never())
      : policy_(policy), deadline_(deadline) {}
  WaitBudget(const WaitPolicy& policy, double seconds)
      : policy_(policy), deadline_(Deadline::after(seconds)), seconds_(seconds) {}

  const WaitPolicy& policy() const { return policy_; }
  double seconds() const { return seconds_; }
  Deadline deadline() const { return deadline_; }

  // Account for one attempt to advance; pause or yield if it moved nothing. Return whether to try again at once. If
  // not, it is time to look at what else may end the wait, and to sleep if nothing moved.
  bool spend(Progress progress);
  // Begin to poll again, after a sleep.
  void renew() { polls_ = 0, polling_since_ns_ = 0, moving_since_ns_ = 0; }
  // Something other than its operation ends the wait. The last missing data may have come just before, so an operation
  // that still moves is advanced for a while: the time is limited, because other traffic may keep it busy for ever.
  // Return whether that goes on after an attempt with this result.
  bool extend(Progress progress);
  // A later look has found nothing that ends the wait: the cause was about a peer that is no longer needed.
  void restore() { ending_since_ns_ = 0; }

 private:
  // After this many polls, each one yields the core: the awaited rank may be waiting for it, when other programs keep
  // the cores busy. On an idle core a yield returns in some 0.3 us.
  static constexpr int kPurePolls = 100;
  static constexpr int kStepsBetweenClocks = 16;
  // A yield that took longer has let another thread run.
  static constexpr int64_t kSwitchNs = 1'000;
  static constexpr int64_t kExtensionNs = 200'000'000;

  bool pause();
  bool yield();
  bool spend_move();

  const WaitPolicy policy_;
  const Deadline deadline_;
  const double seconds_ = 0;  // the time limit as the caller gave it, for the error
  int polls_ = 0;             // where ranks outnumber cores, only the yields that let another thread run
  int64_t polling_since_ns_ = 0;
  int64_t moving_since_ns_ = 0;
  int64_t ending_since_ns_ = 0;
};

// Where a waiter sleeps and what it looks after; implemented by the engine.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // Sleep at most this long, unless `ready` (called after the sleeper is registered) says there is work.
  virtual void sleep(int64_t nanoseconds, const std::function<bool()>& ready) = 0;
  // Changes when a peer is lost or has left, or the engine is aborted: then polling ends at once.
  virtual const std::atomic<uint32_t>& news() const = 0;
};

// Returns what, outside of the operation itself, ends the wait for it: a lost or failed peer, an abort, a deadlock.
using Look = std::function<std::optional<Failure>(const Operation&)>;

// Advance `operation` until it has completed. The result of `look`, an interrupt or a timeout ends the operation before
// that. One that other threads advance, too, goes on: then what ends the wait is returned, a timeout without its
// details. Called without the language's lock.
std::optional<Failure> wait(Operation& operation, WaitBudget& budget, Waiter& waiter, LanguageRuntime& language,
                            const Look& look);

}  // namespace procgroup
