#include "engine/progress_thread.hpp"

#include <algorithm>

namespace procgroup {
namespace {

constexpr int64_t kSliceNs = 20'000'000;

}  // namespace

ProgressThread::ProgressThread(Lounge& lounge, const WaitPolicy& policy) : lounge_(lounge), policy_(policy) {}

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

void ProgressThread::notify() {
  const std::lock_guard lock(mutex_);
  work_ = true;
  if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

Progress ProgressThread::advance_all() {
  const std::lock_guard pass(pass_);
  Progress progress = Progress::kDone;
  for (Source* source : sources_) {
    const Progress one = source->advance_pending();
    if (one == Progress::kMoved) progress = Progress::kMoved;
    if (one == Progress::kWaiting && progress == Progress::kDone) progress = Progress::kWaiting;
  }
  return progress;
}

void ProgressThread::examine_all() {
  const std::lock_guard pass(pass_);
  for (Source* source : sources_) source->examine_pending();
}

void ProgressThread::run() {
  Patience patience(policy_);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (stop_) return;
      work_ = false;
    }
    const Progress progress = advance_all();
    if (progress == Progress::kMoved) {
      patience.renew();
    } else if (progress == Progress::kDone) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return work_ || stop_; });
      patience.renew();
    } else if (!patience.wait_a_moment()) {
      examine_all();
      bool moved = false;
      lounge_.sleep(kSliceNs, [&] { return moved = advance_all() != Progress::kWaiting; });
      if (moved) patience.renew();
    }
  }
}

}  // namespace procgroup
