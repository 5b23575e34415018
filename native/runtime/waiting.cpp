#include "runtime/waiting.hpp"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/processor.hpp"

namespace procgroup {
namespace {

constexpr int64_t kLongestSleepNs = 50'000'000;  // how late deadlines, deaths and Ctrl-C may be noticed

}  // namespace

bool WaitBudget::spend(Progress progress) {
  if (progress == Progress::kMoved) return spend_move();
  return policy_.oversubscribed ? yield() : pause();
}

bool WaitBudget::spend_move() {
  polls_ = 0, polling_since_ns_ = 0;
  const int64_t now = now_ns();
  if (moving_since_ns_ == 0) moving_since_ns_ = now;
  if (now - moving_since_ns_ <= policy_.slice_ns) return true;
  renew();
  return false;
}

bool WaitBudget::pause() {
  polls_ < kPurePolls ? cpu_pause() : static_cast<void>(sched_yield());
  if (++polls_ % kStepsBetweenClocks != 0) return true;
  const int64_t now = now_ns();
  if (polling_since_ns_ == 0) polling_since_ns_ = now;
  return now - polling_since_ns_ < policy_.spin_ns;
}

bool WaitBudget::yield() {
  const int64_t before = now_ns();
  if (polling_since_ns_ == 0) polling_since_ns_ = before;
  sched_yield();
  const int64_t now = now_ns();
  if (now - before > kSwitchNs) ++polls_;
  return polls_ < policy_.switches && now - polling_since_ns_ < policy_.spin_ns;
}

bool WaitBudget::extend(Progress progress) {
  const int64_t now = now_ns();
  if (ending_since_ns_ == 0) ending_since_ns_ = now;
  return progress != Progress::kWaiting && now - ending_since_ns_ <= kExtensionNs;
}

std::optional<Failure> wait(Operation& operation, WaitBudget& budget, Waiter& waiter, LanguageRuntime& language,
                            const Look& look) {
  if (operation.is_completed()) return std::nullopt;
  const Deadline deadline = budget.deadline();
  // A peer that was lost before the first look is found by that look.
  uint32_t known = waiter.news().load(std::memory_order_acquire);
  for (;;) {
    Progress progress = operation.help();
    if (progress == Progress::kDone) return std::nullopt;
    const bool has_news = progress == Progress::kWaiting && waiter.news().load(std::memory_order_relaxed) != known;
    if (!has_news && budget.spend(progress)) continue;
    known = waiter.news().load(std::memory_order_acquire);
    std::optional<Failure> failure = look(operation);
    if (!failure && language.interrupted()) failure = Interrupted{};
    if (!failure && deadline.passed()) failure = Timeout{};
    if (failure && budget.policy().is_helping) {
      if (!operation.is_completed()) return failure;
    } else if (failure) {
      if (!budget.extend(operation.help()) && !operation.is_completed()) {
        if (auto* timeout = failure->as<Timeout>(); timeout != nullptr && timeout->seconds == 0)
          *timeout = {.seconds = budget.seconds(), .missing = operation.missing()};
        operation.give_up(*std::move(failure));
      }
    } else {
      budget.restore();
      const int64_t longest_ns = budget.policy().is_helping ? kLongestSleepNs : operation.longest_sleep_ns();
      waiter.sleep(deadline.remaining_ns(std::min(kLongestSleepNs, longest_ns)),
                   [&] { return (progress = operation.help()) != Progress::kWaiting; });
    }
    if (operation.is_completed()) return std::nullopt;
    if (!budget.policy().is_helping || progress != Progress::kWaiting) budget.renew();
  }
}

}  // namespace procgroup
