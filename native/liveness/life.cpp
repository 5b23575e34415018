#include "liveness/life.hpp"

#include <errno.h>
#include <poll.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/native_thread.hpp"

namespace procgroup {

namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kLookNs = 100 * kMillisecond;  // how often to look although nothing woke the watcher
constexpr int64_t kPollNs = 20 * kMillisecond;   // the same where words cannot be slept on
constexpr int64_t kGraceNs = 80 * kMillisecond;  // for a word to follow its socket's end
constexpr size_t kMostSleeps = 128;              // FUTEX_WAITV_MAX
constexpr uint32_t kSharedFutex = 2;             // FUTEX_32, and not FUTEX_PRIVATE_FLAG

#ifdef SYS_futex_waitv
constexpr long kFutexWaitv = SYS_futex_waitv;
#else
constexpr long kFutexWaitv = 449;  // on every architecture; missing from older headers
#endif

// struct futex_waitv, which older headers lack.
struct FutexWait {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

timespec monotonic_time_in(int64_t nanoseconds) {
  const int64_t at = now_ns() + nanoseconds;
  return {static_cast<time_t>(at / 1'000'000'000), static_cast<long>(at % 1'000'000'000)};
}

}  // namespace

LifeLock::LifeLock(LifeWord& word) : word_(word) {
  thread_ = start_native_thread("pg-life", [this] { hold(); });
  await_change(kStarting);
}

void LifeLock::release() {
  if (!thread_.joinable()) return;
  enter(kReleasing);
  thread_.join();
}

// The body of the life thread. A robust list is a ring of nodes; the word is at a fixed distance from its
// node, so that one node on this stack serves a word in any mapping.
void LifeLock::hold() {
  robust_list node{};
  robust_list_head head{};
  node.next = &head.list;
  head.list.next = &node;
  head.futex_offset = static_cast<long>(reinterpret_cast<intptr_t>(&word_.word) - reinterpret_cast<intptr_t>(&node));
  robust_ = syscall(SYS_set_robust_list, &head, sizeof head) == 0;
  // FUTEX_WAITERS from the start: the kernel then wakes at a death, and watchers need not write the word.
  word_.word.store(static_cast<uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS, std::memory_order_release);
  enter(kHeld);
  await_change(kHeld);
  // First the word, then the list: whenever the process dies in between, peers see that it left.
  word_.word.store(0, std::memory_order_release);
  if (robust_) syscall(SYS_set_robust_list, nullptr, sizeof head);
  futex_wake_all(word_.word);
}

void LifeLock::enter(State state) {
  state_.store(state, std::memory_order_release);
  futex_wake_all(state_);
}

void LifeLock::await_change(State from) {
  while (state_.load(std::memory_order_acquire) == from) futex_wait(state_, from, 1000 * kMillisecond);
}

LifeWatcher::LifeWatcher(OnLost on_lost, OnLeft on_left, Waiting waiting)
    : on_lost_(std::move(on_lost)), on_left_(std::move(on_left)), waiting_(waiting) {
  thread_ = start_native_thread("pg-watch", [this] { run(); });
}

LifeWatcher::~LifeWatcher() {
  stop_.store(true, std::memory_order_release);
  change();
  thread_.join();
}

void LifeWatcher::watch(int peer, LifeWord& word, int socket) {
  {
    const std::lock_guard lock(mutex_);
    watched_.push_back({peer, &word, socket, 0});
  }
  change();
}

void LifeWatcher::forget(int peer) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(watched_, [peer](const Watched& watched) { return watched.peer == peer; });
  }
  change();
}

void LifeWatcher::change() {
  changes_.fetch_add(1, std::memory_order_release);
  futex_wake_all(changes_);
}

void LifeWatcher::run() {
  while (!stop_.load(std::memory_order_acquire)) {
    for (const Verdict& verdict : examine()) {
      if (stop_.load(std::memory_order_acquire)) return;
      verdict.lost ? on_lost_(verdict.peer, *verdict.lost) : on_left_(verdict.peer);
    }
    sleep();
  }
}

// Look at every word and socket, take out the peers that ended, and note what to sleep on until the next
// change. What was noted before it was read cannot be missed: the kernel compares the values again.
std::vector<LifeWatcher::Verdict> LifeWatcher::examine() {
  std::vector<Verdict> verdicts;
  sleeps_.assign(1, {&changes_, changes_.load(std::memory_order_acquire)});
  const std::lock_guard lock(mutex_);
  const std::vector<bool> closed = closed_sockets();
  std::vector<Watched> living;
  for (size_t i = 0; i < watched_.size(); ++i) {
    Watched& watched = watched_[i];
    // Acquire: what the owner wrote before it left is visible to on_left.
    const uint32_t value = watched.word->word.load(std::memory_order_acquire);
    if (auto verdict = judge(watched, value, closed[i])) {
      verdicts.push_back(std::move(*verdict));
      // The kernel woke one waiter. Mapped at different addresses, the word is one futex for all of them.
      futex_wake_all(watched.word->word);
    } else {
      living.push_back(watched);
      sleeps_.push_back({&watched.word->word, value});
    }
  }
  watched_ = std::move(living);
  return verdicts;
}

std::optional<LifeWatcher::Verdict> LifeWatcher::judge(Watched& watched, uint32_t value, bool socket_is_closed) const {
  if (value == 0) return Verdict{watched.peer, std::nullopt};
  if (value & FUTEX_OWNER_DIED) return Verdict{watched.peer, "its process ended"};
  if (!socket_is_closed) return std::nullopt;
  const int64_t now = now_ns();
  if (watched.closed_at_ns == 0) watched.closed_at_ns = now;
  if (now - watched.closed_at_ns < kGraceNs) return std::nullopt;
  return Verdict{watched.peer, "its connection closed"};
}

std::vector<bool> LifeWatcher::closed_sockets() const {
  std::vector<pollfd> sockets;
  for (const Watched& watched : watched_) sockets.push_back({watched.socket, POLLRDHUP, 0});
  std::vector<bool> closed(sockets.size(), false);
  if (poll(sockets.data(), sockets.size(), 0) <= 0) return closed;
  for (size_t i = 0; i < sockets.size(); ++i) closed[i] = (sockets[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  return closed;
}

void LifeWatcher::sleep() {
  const bool all = waiting_ == Waiting::kFutexes && sleeps_.size() <= kMostSleeps;
  if (waiting_ == Waiting::kFutexes && !sleep_on_words(all ? kLookNs : kPollNs)) waiting_ = Waiting::kPolling;
  if (waiting_ == Waiting::kPolling) futex_wait(changes_, sleeps_[0].value, kPollNs);
}

// Sleep until one of the words changes; return whether this kernel can do that.
bool LifeWatcher::sleep_on_words(int64_t nanoseconds) {
  FutexWait waits[kMostSleeps];
  const size_t count = std::min(sleeps_.size(), kMostSleeps);
  for (size_t i = 0; i < count; ++i)
    waits[i] = {sleeps_[i].value, reinterpret_cast<uintptr_t>(sleeps_[i].word), kSharedFutex, 0};
  const timespec until = monotonic_time_in(nanoseconds);
  if (syscall(kFutexWaitv, waits, count, 0, &until, CLOCK_MONOTONIC) >= 0) return true;
  // EFAULT: a word was forgotten and its mapping taken away since it was noted.
  return errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT || errno == EFAULT;
}

}  // namespace procgroup
