#include "runtime/waiting.hpp"

#include <sched.h>

#include <algorithm>

#include "base/pause.hpp"

namespace procgroup {
namespace {

constexpr int64_t kSliceNs = 50'000'000;  // how late deadlines, deaths and Ctrl-C may be noticed

class Unlocked {
 public:
  explicit Unlocked(LanguageRuntime& language) : language_(language) { language_.unlock(); }
  ~Unlocked() { language_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  LanguageRuntime& language_;
};

// Poll until the operation has completed (true), or nothing has moved for as long as polling pays, or it is time to
// look at what else may end the wait.
bool poll_unlocked(Operation& operation, const WaitPolicy& policy, const std::atomic<uint32_t>& news, uint32_t known) {
  Backoff backoff(policy);
  Slice slice;
  for (;;) {
    switch (operation.advance()) {
      case Progress::kDone:
        return true;
      case Progress::kMoved:
        if (slice.is_completed()) return false;
        backoff.renew();
        break;
      case Progress::kWaiting:
        if (news.load(std::memory_order_relaxed) != known || !backoff.wait_a_moment()) return false;
    }
  }
}

}  // namespace

bool Backoff::wait_a_moment() {
  if (policy_.oversubscribed) return yield();
  moments_ < kPurePolls ? cpu_pause() : static_cast<void>(sched_yield());
  if (++moments_ % kMomentsBetweenClocks != 0) return true;
  const int64_t now = now_ns();
  if (since_ns_ == 0) since_ns_ = now;
  return now - since_ns_ < spin_ns_;
}

bool Backoff::yield() {
  const int64_t before = now_ns();
  if (since_ns_ == 0) since_ns_ = before;
  sched_yield();
  const int64_t now = now_ns();
  if (now - before > kSwitchNs) ++moments_;
  return moments_ < policy_.switches && now - since_ns_ < spin_ns_;
}

void drive(Operation& operation, double seconds, const WaitPolicy& policy, Waiter& waiter, LanguageRuntime& language,
           const Examine& examine) {
  if (operation.is_completed()) return;
  const Deadline deadline = Deadline::after(seconds);
  LastLooks last_looks;
  const Unlocked unlocked(language);
  // A peer that was lost before the first look is found by the first examination.
  uint32_t known = waiter.news().load(std::memory_order_acquire);
  while (!poll_unlocked(operation, policy, waiter.news(), known)) {
    known = waiter.news().load(std::memory_order_acquire);
    std::optional<Failure> failure = examine(operation);
    if (!failure && language.interrupted()) failure = Failure{.kind = Failure::Kind::kInterrupted};
    if (!failure && deadline.passed())
      failure = Failure{.kind = Failure::Kind::kTimeout, .seconds = seconds, .missing = operation.missing()};
    bool moved = false;
    const auto ready = [&] { return moved = operation.advance() != Progress::kWaiting; };
    if (failure) {
      const bool exhausted = last_looks.are_exhausted();
      if ((!ready() || exhausted) && !operation.is_completed()) operation.give_up(std::move(*failure));
    } else {
      last_looks = {};
      waiter.sleep(deadline.remaining_ns(std::min(kSliceNs, operation.longest_sleep_ns())), ready);
    }
    if (operation.is_completed()) return;
  }
}

bool await_completion(Operation& operation, Deadline deadline, const WaitPolicy& policy, Waiter& waiter,
                      LanguageRuntime& language, bool& interrupted, const std::function<void()>& look) {
  Progress progress = operation.help();
  for (int poll = 0; poll < policy.held_polls() && progress == Progress::kWaiting; ++poll) {
    cpu_pause();
    progress = operation.help();
  }
  if (progress == Progress::kDone) return true;
  const Unlocked unlocked(language);
  const Operation::Awaiting awaiting(operation);
  Backoff backoff(policy);
  Slice slice;
  while ((progress = operation.help()) != Progress::kDone) {
    if (progress == Progress::kMoved) {
      backoff.renew();
      if (!slice.is_completed()) continue;
      slice = {};
    } else if (backoff.wait_a_moment()) {
      continue;
    }
    if ((interrupted = language.interrupted())) return false;
    if (deadline.passed()) return false;
    look();
    if (progress == Progress::kWaiting)
      waiter.sleep(deadline.remaining_ns(kSliceNs), [&] { return operation.help() != Progress::kWaiting; });
  }
  return true;
}

}  // namespace procgroup
