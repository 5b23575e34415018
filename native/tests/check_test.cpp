// A native test that fails, crashes or hangs says where it was, and how to run it again.
#include "tests/check.hpp"

#include <sys/wait.h>

#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace procgroup::testing {
namespace {

// What a process prints that ends by `signal_number`.
std::string output_of(const std::function<void()>& failing, int signal_number) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
    close(ends[1]);
    failing();
    _exit(0);
  }
  close(ends[1]);
  std::string output;
  char some[512];
  for (ssize_t got; (got = read(ends[0], some, sizeof some)) > 0;) output.append(some, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_EQUAL(WTERMSIG(status), signal_number);
  return output;
}

void check_says(const std::string& output, const std::string& expected) {
  CASE("expected '%s' in '%s'", expected.c_str(), output.c_str());
  CHECK(output.find(expected) != std::string::npos);
}

void a_failure_names_the_cases_of_all_threads_and_the_test() {
  CASE("broadcast, %d ranks", 3);
  const std::string output = output_of(
      [] {
        std::thread([] {
          {
            CASE("an earlier case");
          }
          CASE("rank %d", 2);
          CASE("root %d", 1);
          CHECK(1 > 2);
        }).join();
      },
      SIGABRT);
  check_says(output, ": does not hold: 1 > 2\n");
  check_says(output, "\n  in the case: rank 2; root 1\n  in another thread: broadcast, 3 ranks\n");
  check_says(output, "  in the test: a_failure_names_the_cases_of_all_threads_and_the_test\n  to run it again: ");
  check_says(output, " a_failure_names_the_cases_of_all_threads_and_the_test\n");
  CHECK(output.find("earlier") == std::string::npos);
}

void values_that_differ_are_printed() {
  const auto differ = [](const auto& got, const auto& expected) {
    return output_of([&] { CHECK_EQUAL(got, expected); }, SIGABRT);
  };
  check_says(differ(7, 8), "got 7, expected 8\n");
  check_says(differ(std::string("a"), "b"), "got a, expected b\n");
  check_says(differ(std::vector<int>{1, 2, 3}, std::vector<int>{1, 5}),
             "got 3 elements, expected 2; they differ from element 1 on: got 2, expected 5\n");
  CHECK_EQUAL(std::vector<int>{1}, std::vector<int>{1});
}

void a_hang_and_an_exception_name_the_case() {
  CASE("a case");
  const std::string hung = output_of([] { raise(SIGALRM); }, SIGALRM);
  check_says(hung, "still running at its time limit\n  in the case: a case\n");
  check_says(output_of([] { std::thread([] { throw std::runtime_error("why"); }).join(); }, SIGABRT),
             "in another thread: a case\n");
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  RUN_TEST(a_failure_names_the_cases_of_all_threads_and_the_test);
  RUN_TEST(values_that_differ_are_printed);
  RUN_TEST(a_hang_and_an_exception_name_the_case);
}
