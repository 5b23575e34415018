#include "runtime/observer.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "base/native_thread.hpp"
#include "runtime/stack_sampler.hpp"

namespace procgroup {

Observer::Observer(FlightRecord& record, std::function<void()> every_beat)
    : record_(record),
      every_beat_(std::move(every_beat)),
      caller_(getpid()),  // the main thread
      answered_(record.stack_requests().load(std::memory_order_relaxed)) {
  thread_ = start_native_thread("pg-observe", [this] { run(); });
}

pid_t Observer::own_thread() {
  static thread_local const pid_t number = static_cast<pid_t>(syscall(SYS_gettid));
  return number;
}

void Observer::stop() {
  stop_.store(true, std::memory_order_release);
  if (!thread_.joinable()) return;
  record_.request_stack();
  thread_.join();
}

void Observer::run() {
  std::atomic<uint32_t>& requests = record_.stack_requests();
  for (;;) {
    const bool is_asked = requests.load(std::memory_order_acquire) != answered_;
    futex_wait(requests, is_asked ? requests.load(std::memory_order_acquire) : answered_,
               is_asked ? kStackNs : kBeatNs);
    if (stop_.load(std::memory_order_acquire)) return;
    record_.beat();
    const uint32_t request = requests.load(std::memory_order_acquire);
    if (request != answered_) answer(request);
    every_beat_();
  }
}

// Many ranks may ask at once: one stack answers them all.
void Observer::answer(uint32_t request) {
  if (now_ns() - sampled_ns_ < kStackNs) return;
  answered_ = request;
  StackSampler& sampler = StackSampler::of_process();
  std::string stack = sampler.sample(caller_.load(std::memory_order_relaxed));
  if (stack.empty()) stack = sampler.sample(getpid());  // the main thread: that one may have ended
  record_.set_stack(stack);
  sampled_ns_ = now_ns();
}

}  // namespace procgroup
