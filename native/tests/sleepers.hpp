// Counts the threads that sleep on a futex, and wakes none of them. A test thus finds a thread that was not woken
// before the end of its slice wakes it.
#pragma once

#include <sched.h>

#include <cerrno>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "tests/check.hpp"

namespace procgroup::testing {

// FUTEX_CMP_REQUEUE returns the number of threads that it moves to another word; here both words are the same. A thread
// that was woken is not counted, whether it has run since or not.
inline long sleepers_on(std::atomic<uint32_t>& word) {
  auto* address = reinterpret_cast<uint32_t*>(&word);
  for (;;) {
    const uint32_t value = word.load(std::memory_order_seq_cst);
    const long moved = syscall(SYS_futex, address, FUTEX_CMP_REQUEUE, 0, INT_MAX, address, value);
    if (moved >= 0) return moved;
    CHECK_EQUAL(errno, EAGAIN);  // the word has changed since
  }
}

inline void await_sleepers(std::atomic<uint32_t>& word, long count) {
  const Deadline deadline = Deadline::after(60);
  long asleep = sleepers_on(word);
  for (; asleep != count && !deadline.passed(); asleep = sleepers_on(word)) sched_yield();
  CHECK_EQUAL(asleep, count);
}

}  // namespace procgroup::testing
