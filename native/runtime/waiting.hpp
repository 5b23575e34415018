// How a rank waits for an operation: spin, then yield or sleep; always with a deadline.
//
//     holding the language's lock   about 2 us of polling, by the callers of drive(): giving the lock away can cost
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
  int64_t background_spin_ns = 60'000;  // of the progress thread, beside callers that compute
  // An oversubscribed rank sleeps earlier, after so many yields that let another thread run. The awaited rank is often
  // the next one on this core, but a thread that only polls takes the core from those that copy.
  int switches = 8;

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

// How long one waiter goes on polling before it sleeps.
class Backoff {
 public:
  explicit Backoff(const WaitPolicy& policy) : Backoff(policy, policy.spin_ns) {}
  Backoff(const WaitPolicy& policy, int64_t spin_ns) : policy_(policy), spin_ns_(spin_ns) {}

  // Something moved: begin again.
  void renew() { moments_ = 0, since_ns_ = 0; }
  // Pause or yield once; false when it is time to sleep.
  bool wait_a_moment();

 private:
  // After this many moments, each one yields the core: the awaited rank may be waiting for it, when other programs keep
  // the cores busy. On an idle core a yield returns in some 0.3 us.
  static constexpr int kPurePolls = 100;
  static constexpr int kMomentsBetweenClocks = 16;
  // A yield that took longer has let another thread run.
  static constexpr int64_t kSwitchNs = 1'000;

  bool yield();

  const WaitPolicy& policy_;
  const int64_t spin_ns_;
  int moments_ = 0;  // where ranks outnumber cores, only the yields that let another thread run
  int64_t since_ns_ = 0;
};

// Moves are no proof that the awaited rank lives: other traffic moves too. So even while things move, a
// waiter comes up for air this often.
class Slice {
 public:
  bool is_completed() {
    if (++moves_ % kMovesBetweenClocks != 0) return false;
    const int64_t now = now_ns();
    if (began_ns_ == 0) began_ns_ = now;
    return now - began_ns_ > kLengthNs;
  }

 private:
  static constexpr int kMovesBetweenClocks = 16;
  static constexpr int64_t kLengthNs = 50'000'000;

  int moves_ = 0;
  int64_t began_ns_ = 0;
};

// A timeout or failure may be seen just after the last missing block arrived, so an operation that still makes progress
// is advanced for a while before it is cancelled. The time is limited, since other traffic may keep it busy for ever.
// It begins again when a look finds nothing that ends the wait: what the last one found was about a peer that is done
// with.
class LastLooks {
 public:
  // Called at every look after something has ended the wait.
  bool are_exhausted() {
    const int64_t now = now_ns();
    if (since_ns_ == 0) since_ns_ = now;
    return now - since_ns_ > kLengthNs;
  }

 private:
  static constexpr int64_t kLengthNs = 200'000'000;

  int64_t since_ns_ = 0;
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

// Tells what, outside of the operation itself, ends it: a lost or failed peer, an abort.
using Examine = std::function<std::optional<Failure>(const Operation&)>;

// Advance `operation` until it has completed. `seconds` is its time limit. Host's lock is held on entry and exit.
void drive(Operation& operation, double seconds, const WaitPolicy& policy, Waiter& waiter, LanguageRuntime& language,
           const Examine& examine);

// Wait until another thread has finished `operation`, or this one has with help(), at most until `deadline`; false when
// that passed or when the host interrupted (then `interrupted` is set). `look` is called, unlocked, before each sleep.
bool await_completion(Operation& operation, Deadline deadline, const WaitPolicy& policy, Waiter& waiter,
                      LanguageRuntime& language, bool& interrupted, const std::function<void()>& look);

}  // namespace procgroup
