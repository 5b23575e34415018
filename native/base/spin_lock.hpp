// A lock for sections of nanoseconds to microseconds, for std::lock_guard.
#pragma once

#include <sched.h>

#include <atomic>

namespace procgroup {

class SpinLock {
 public:
  // The holder may have lost its core: leave it this one.
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_;
};

}  // namespace procgroup
