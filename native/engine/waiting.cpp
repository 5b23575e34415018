#include "engine/waiting.hpp"

#include <sched.h>

#include "base/pause.hpp"

namespace procgroup {
namespace {

constexpr int kHeldPolls = 40;                    // about 2 us of pauses
constexpr int64_t kSliceNs = 50'000'000;          // how late deadlines, deaths and Ctrl-C may be noticed
constexpr int kPollsBetweenClocks = 16;
// After this many polls, every poll offers the core to whoever else wants it: the awaited rank may be one
// of them, when other programs keep the cores busy. On an idle core a yield returns in some 0.3 us.
constexpr int kPurePolls = 100;

class Unlocked {
 public:
  explicit Unlocked(Host& host) : host_(host) { host_.unlock(); }
  ~Unlocked() { host_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Host& host_;
};

bool poll_holding_lock(Operation& operation, const WaitPolicy& policy) {
  if (operation.advance() == Progress::kDone) return true;
  if (policy.oversubscribed || !policy.hold_lock) return false;
  for (int poll = 0; poll < kHeldPolls; ++poll) {
    cpu_pause();
    switch (operation.advance()) {
      case Progress::kDone: return true;
      case Progress::kMoved: return false;  // a large call: long enough to let others run
      case Progress::kWaiting: break;
    }
  }
  return false;
}

// Poll until the operation is over (true) or nothing has moved for as long as polling pays.
bool poll_unlocked(Operation& operation, const WaitPolicy& policy) {
  const int64_t patience = policy.oversubscribed ? policy.yield_ns : policy.spin_ns;
  int64_t started = now_ns();
  for (int poll = 1;; ++poll) {
    const Progress progress = operation.advance();
    if (progress == Progress::kDone) return true;
    if (progress == Progress::kMoved) {
      started = now_ns();
    } else if (policy.oversubscribed || poll > kPurePolls) {
      sched_yield();
    } else {
      cpu_pause();
    }
    if (poll % kPollsBetweenClocks == 0 && now_ns() - started > patience) return false;
  }
}

}  // namespace

void drive(Operation& operation, double seconds, const WaitPolicy& policy, Lounge& lounge, Host& host,
           const Examine& examine) {
  if (poll_holding_lock(operation, policy)) return;
  const Deadline deadline = Deadline::after(seconds);
  const Unlocked unlocked(host);
  while (!poll_unlocked(operation, policy)) {
    std::optional<Failure> failure = examine(operation);
    if (!failure && host.interrupted()) failure = Failure{.kind = Failure::Kind::kInterrupted};
    if (!failure && deadline.passed())
      failure = Failure{.kind = Failure::Kind::kTimeout, .seconds = seconds, .missing = operation.missing()};
    bool moved = false;
    const auto ready = [&] { return moved = operation.advance() != Progress::kWaiting; };
    if (failure) {
      // What ended the wait may have come just after the last missing piece: look once more.
      if (!ready()) operation.give_up(std::move(*failure));
    } else {
      lounge.sleep(deadline.remaining_ns(kSliceNs), ready);
    }
    if (operation.is_over()) return;
  }
}

bool await_completion(const Operation& operation, Deadline deadline, Lounge& lounge, Host& host, bool& interrupted) {
  if (operation.is_over()) return true;
  const Unlocked unlocked(host);
  while (!operation.is_over()) {
    if ((interrupted = host.interrupted())) return false;
    if (deadline.passed()) return false;
    lounge.sleep(deadline.remaining_ns(kSliceNs), [&] { return operation.is_over(); });
  }
  return true;
}

}  // namespace procgroup
