// The futex system call on words in shared memory. std::atomic::wait cannot be used there: it waits on
// process-private futexes, which another process cannot wake.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace procgroup {

// Sleep while `word` holds `expected`, at most `nanoseconds`; returns early for wakes and signals.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t nanoseconds) {
  timespec timeout{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace procgroup
