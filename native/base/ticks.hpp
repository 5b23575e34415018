// The processor's own clock: several times cheaper to read than CLOCK_MONOTONIC, in a unit of its own.
//
// It runs at a constant rate and alike on all cores, on x86 (invariant TSC) and on Arm.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace procgroup {

inline uint64_t now_ticks() {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return static_cast<uint64_t>(now_ns());
#endif
}

// One moment on both clocks.
struct ClockPair {
  uint64_t ticks;
  int64_t ns;

  static ClockPair now() { return {now_ticks(), now_ns()}; }
  // When this library was loaded. Long enough ago that times between it and now can be converted with little error.
  static ClockPair at_load();
};

inline const ClockPair kLoaded = ClockPair::now();
inline ClockPair ClockPair::at_load() { return kLoaded; }

// Nanoseconds on the monotonic clock of a moment between `from` and `to`.
inline int64_t ticks_to_ns(uint64_t ticks, const ClockPair& from, const ClockPair& to) {
  if (to.ticks <= from.ticks) return to.ns;
  const double passed = static_cast<double>(static_cast<int64_t>(ticks - from.ticks));
  return from.ns + static_cast<int64_t>(passed / static_cast<double>(to.ticks - from.ticks) *
                                        static_cast<double>(to.ns - from.ns));
}

}  // namespace procgroup
