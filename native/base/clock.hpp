// Time: one monotonic clock, and deadlines on it. Timeouts become deadlines where a call enters the engine.
#pragma once

#include <time.h>

#include <cstdint>
#include <limits>

namespace procgroup {

inline int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// A moment on the monotonic clock, in nanoseconds.
struct Deadline {
  int64_t at_ns = std::numeric_limits<int64_t>::max();

  static Deadline never() { return {}; }
  static Deadline after(double seconds) {
    if (!(seconds < 1e9)) return never();
    return {now_ns() + static_cast<int64_t>(seconds * 1e9)};
  }
  bool passed() const { return now_ns() >= at_ns; }
  // Nanoseconds that are left, between 0 and `most`.
  int64_t remaining_ns(int64_t most) const {
    const int64_t left = at_ns == std::numeric_limits<int64_t>::max() ? most : at_ns - now_ns();
    return left < 0 ? 0 : (left < most ? left : most);
  }
  double remaining_seconds() const { return static_cast<double>(remaining_ns(INT64_MAX)) / 1e9; }
};

}  // namespace procgroup
