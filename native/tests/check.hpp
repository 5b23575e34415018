// What the native tests assert with, and the clock that ends a test which hangs.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "base/clock.hpp"

// Holds in release builds too, unlike assert.
#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace procgroup::testing {

// The whole test program dies by SIGALRM when it takes longer than this.
inline void limit_seconds(unsigned seconds) { alarm(seconds); }

inline void run_test(const char* name, void (*test)()) {
  const int64_t begin = now_ns();
  std::fprintf(stderr, "%s ...", name);
  test();
  std::fprintf(stderr, " %.0f ms\n", static_cast<double>(now_ns() - begin) / 1e6);
}

}  // namespace procgroup::testing

#define RUN_TEST(test) ::procgroup::testing::run_test(#test, test)
