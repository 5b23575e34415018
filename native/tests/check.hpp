// What the native tests assert with, and what a test says that fails, crashes or hangs: its name, the cases that it is
// in, and the command that runs it again.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/clock.hpp"

// Holds in release builds too, unlike assert.
#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "\n%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)

// Prints both values, or from which element on two arrays differ.
#define CHECK_EQUAL(got, expected) \
  ::procgroup::testing::check_equal(__FILE__, __LINE__, #got " == " #expected, (got), (expected))

// Names what the rest of the scope does, as printf: `CASE("broadcast, %d ranks, root %d", size, root);`. It costs
// some 300 ns, so not in the innermost loop.
#define CASE(...) const ::procgroup::testing::NamedCase PROCGROUP_JOIN(case_, __COUNTER__)(__VA_ARGS__)
#define PROCGROUP_JOIN(name, number) PROCGROUP_JOIN_EXPANDED(name, number)
#define PROCGROUP_JOIN_EXPANDED(name, number) name##number

// `RUN_TEST(test)` calls test(), `RUN_TEST(test, 2, true)` test(2, true). An argument of the program has it run those
// tests only that have the argument in their names.
#define RUN_TEST(test, ...) ::procgroup::testing::run_test(#test, [&] { test(__VA_ARGS__); })

namespace procgroup::testing {

// The cases that a thread is in, the outermost first.
struct ThreadCases {
  std::atomic<bool> taken = false;
  size_t size = 0;
  char text[512] = "";

  void append(const char* between, const char* format, va_list arguments) {
    for (; *between != '\0' && size + 1 < sizeof text; ++between) text[size++] = *between;
    const int wanted = std::vsnprintf(text + size, sizeof text - size, format, arguments);
    size = std::min(size + static_cast<size_t>(wanted), sizeof text - 1);
  }
  void cut(size_t end) { text[size = end] = '\0'; }
};

// Enters a case of this thread until the end of the scope. The cases of all threads are in one table, without locks,
// because a signal handler prints them: the thread that fails may be a rank of a case which its parent has named.
class NamedCase {
 public:
  [[gnu::format(printf, 2, 3)]] explicit NamedCase(const char* format, ...) {
    for (ThreadCases* one = table; mine == nullptr && one != std::end(table); ++one)
      if (!one->taken.exchange(true)) mine = one;
    if (mine == nullptr) return;
    outer_ = mine->size;
    va_list arguments;
    va_start(arguments, format);
    mine->append(outer_ > 0 ? "; " : "", format, arguments);
    va_end(arguments);
  }
  ~NamedCase() {
    if (mine == nullptr) return;
    mine->cut(outer_);
    if (outer_ > 0) return;
    mine->taken = false;
    mine = nullptr;
  }
  NamedCase(const NamedCase&) = delete;
  NamedCase& operator=(const NamedCase&) = delete;

  // `print` is called with the parts of a line.
  static void print_all(void (*print)(std::initializer_list<const char*>)) {
    if (mine != nullptr) print({"  in the case: ", mine->text, "\n"});
    for (const ThreadCases& one : table)
      if (one.taken && &one != mine) print({"  in another thread: ", one.text, "\n"});
  }

 private:
  static inline ThreadCases table[256];
  static inline thread_local ThreadCases* mine = nullptr;

  size_t outer_ = 0;
};

// ThreadSanitizer makes a program ten times as slow: on a slow machine one takes 80 s by itself.
#ifdef __SANITIZE_THREAD__
inline constexpr unsigned kMostSeconds = 280;
#else
inline constexpr unsigned kMostSeconds = 110;
#endif

class Runs {
 public:
  Runs() {
    std::ifstream command("/proc/self/cmdline");
    std::getline(command, command_, '\0');
    std::getline(command, filter_, '\0');
    command_ += ' ';
    if (const char* seed = std::getenv("PROCGROUP_TEST_SEED")) {
      seed_ = static_cast<unsigned>(std::strtoul(seed, nullptr, 10));
      command_.insert(0, "PROCGROUP_TEST_SEED=" + std::string(seed) + " ");
    }
    struct sigaction action{};
    action.sa_handler = [](int number) { explain(number); };
    for (const int number : {SIGABRT, SIGALRM, SIGSEGV, SIGBUS}) {
      struct sigaction before{};
      sigaction(number, nullptr, &before);
      if (before.sa_handler == SIG_DFL) sigaction(number, &action, nullptr);  // else it is a sanitizer's
    }
    alarm(kMostSeconds);
  }
  ~Runs() {
    if (ran_ || filter_.empty()) return;
    std::fprintf(stderr, "no test of this program has %s in its name\n", filter_.c_str());
    _exit(1);
  }
  static Runs& of_this_program() { return runs; }
  unsigned seed() const { return seed_; }

  template <class Test>
  void run(const char* name, const Test& test) {
    if (std::string_view(name).find(filter_) == std::string_view::npos) return;
    ran_ = true;
    test_ = name;
    const int64_t begin = now_ns();
    std::fprintf(stderr, "%s ...", name);
    test();
    std::fprintf(stderr, " %.0f ms\n", static_cast<double>(now_ns() - begin) / 1e6);
    test_ = nullptr;
  }

 private:
  static void print(std::initializer_list<const char*> parts) {
    for (const char* part : parts)
      if (write(STDERR_FILENO, part, std::strlen(part)) < 0) _exit(1);
  }
  // Calls only what a signal handler may. The first thread that fails speaks for the process.
  static void explain(int number) {
    static std::atomic<bool> begun = false;
    while (begun.exchange(true)) pause();
    if (number == SIGALRM) print({"\nstill running at its time limit\n"});
    if (number == SIGSEGV || number == SIGBUS) print({"\ncrashed: it touched memory that it may not\n"});
    NamedCase::print_all(print);
    if (const char* test = runs.test_)
      print({"  in the test: ", test, "\n  to run it again: ", runs.command_.c_str(), test, "\n"});
    signal(number, SIG_DFL);
    raise(number);
  }

  static Runs runs;
  std::string command_;  // without the name of a test
  std::string filter_;
  unsigned seed_ = 0;
  const char* test_ = nullptr;
  bool ran_ = false;
};
inline Runs Runs::runs;

// The whole test program dies by SIGALRM when it takes longer than this, by default kMostSeconds: ctest ends it some
// seconds later.
inline void limit_seconds(unsigned seconds) { alarm(seconds); }

// What a random test begins with: the same each time, and something else with another PROCGROUP_TEST_SEED.
inline unsigned test_seed(unsigned usual) { return usual + Runs::of_this_program().seed(); }

template <class Test>
void run_test(const char* name, const Test& test) {
  Runs::of_this_program().run(name, test);
}

template <class Value>
std::string shown(const Value& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<Value>)
    out << +static_cast<std::underlying_type_t<Value>>(value);
  else if constexpr (std::integral<Value>)
    out << +value;
  else if constexpr (requires { out << value; })
    out << value;
  else
    out << "another value";
  return out.str();
}

template <class Got, class Expected>
void check_equal(const char* file, int line, const char* expression, const Got& got, const Expected& expected) {
  if (got == expected) return;
  std::fprintf(stderr, "\n%s:%d: does not hold: %s\n", file, line, expression);
  if constexpr (requires { got.begin(), expected.begin(); } && !std::convertible_to<Got, std::string_view>) {
    const auto [mine, theirs] = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end());
    std::fprintf(stderr, "  got %zu elements, expected %zu; they differ from element %zu on: got %s, expected %s\n",
                 got.size(), expected.size(), static_cast<size_t>(mine - got.begin()),
                 mine == got.end() ? "none" : shown(*mine).c_str(),
                 theirs == expected.end() ? "none" : shown(*theirs).c_str());
  } else {
    std::fprintf(stderr, "  got %s, expected %s\n", shown(got).c_str(), shown(expected).c_str());
  }
  std::abort();
}

}  // namespace procgroup::testing
