#include "runtime/progress_thread.hpp"

#include <algorithm>
#include <chrono>

#include "base/clock.hpp"
#include "base/native_thread.hpp"

namespace procgroup {
namespace {

constexpr int64_t kExamineNs = 20'000'000;  // how late deadlines and deaths may be noticed
constexpr int64_t kSpinNs = 60'000;         // before a sleep, beside callers that compute
constexpr auto kRest = std::chrono::milliseconds(2);

}  // namespace

ProgressThread::ProgressThread(Waiter& waiter, const WaitPolicy& policy) : waiter_(waiter), policy_(policy) {}

ProgressThread::~ProgressThread() { stop(); }

void ProgressThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void ProgressThread::add(Source* source) {
  const std::lock_guard pass(pass_);
  sources_.push_back(source);
}

void ProgressThread::remove(Source* source) {
  const std::lock_guard pass(pass_);
  std::erase(sources_, source);
}

// While the thread runs, as in a burst of calls, it looks again without being woken. It sets `sleeps_` before it looks
// at `work_` for the last time, here the order is the other one, and all four accesses have one order: one of the two
// sees the other.
void ProgressThread::notify() {
  work_ = true;
  if (!sleeps_) return;
  const std::lock_guard lock(mutex_);
  start();
}

// Who finds the flag set has made its work known before this thread takes the flag back, and then looks.
void ProgressThread::notify_soon() {
  if (soon_.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  start();
}

void ProgressThread::start() {
  if (!thread_.joinable() && !stop_) thread_ = start_native_thread("pg-progress", [this] { run(); });
  changed_.notify_all();
}

void ProgressThread::rest(std::unique_lock<std::mutex>& lock) {
  soon_.store(true);
  sleeps_ = true;
  changed_.wait_for(lock, kRest, [this] { return work_ || stop_; });
  sleeps_ = false;
  soon_.store(false);
}

Progress ProgressThread::advance_all() {
  const std::lock_guard pass(pass_);
  Progress progress = Progress::kDone;
  for (Source* source : sources_) progress = std::max(progress, source->advance_pending());
  return progress;
}

std::optional<size_t> ProgressThread::open_receives(const Operation& waited, const std::vector<int>& awaited) {
  const std::lock_guard pass(pass_);
  size_t sum = 0;
  for (Source* source : sources_) {
    const std::optional<size_t> one = source->open_receives(waited, awaited);
    if (!one) return std::nullopt;
    sum += *one;
  }
  return sum;
}

bool ProgressThread::note_pending() {
  const std::lock_guard pass(pass_);
  bool is_urgent = false;
  for (Source* source : sources_) is_urgent = source->note_pending() || is_urgent;
  return is_urgent;
}

void ProgressThread::examine_all() {
  const std::lock_guard pass(pass_);
  for (Source* source : sources_) source->examine_pending();
}

int64_t ProgressThread::longest_sleep_ns() {
  const std::lock_guard pass(pass_);
  int64_t longest = kExamineNs;
  for (Source* source : sources_) longest = std::min(longest, source->longest_sleep_ns());
  return longest;
}

void ProgressThread::run() {
  sleeps_ = false;
  WaitPolicy policy = policy_;
  policy.spin_ns = kSpinNs;
  policy.slice_ns = kExamineNs;
  WaitBudget budget(policy);
  uint32_t known = waiter_.news().load(std::memory_order_acquire);
  for (;;) {
    if (stop_) return;
    work_ = false;
    const Progress progress = advance_all();
    if (progress == Progress::kMoved) {
      // What moves must not hide that something else is late.
      if (!budget.spend(progress)) examine_all();
    } else if (progress == Progress::kDone) {
      std::unique_lock lock(mutex_);
      sleeps_ = true;
      changed_.wait(lock, [this] { return work_ || stop_ || soon_; });
      sleeps_ = false;
      if (!work_ && !stop_) rest(lock);
      budget.renew();
    } else if (!note_pending()) {
      std::unique_lock lock(mutex_);
      rest(lock);
      budget.renew();
    } else if (waiter_.news().load(std::memory_order_relaxed) != known || !budget.spend(progress)) {
      known = waiter_.news().load(std::memory_order_acquire);
      examine_all();
      bool moved = false;
      waiter_.sleep(longest_sleep_ns(), [&] { return moved = advance_all() != Progress::kWaiting; });
      if (moved) budget.renew();
    }
  }
}

}  // namespace procgroup
