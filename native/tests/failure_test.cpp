// What a failure says of ranks: short enough for what one rank can tell another, whole wherever that is possible.
#include "engine/failure.hpp"

#include <cstring>
#include <numeric>

#include "check.hpp"

using namespace procgroup;

namespace {

std::string said_of(std::vector<int> missing) {
  const std::string text =
      Failure{.kind = Failure::Kind::kTimeout, .seconds = 0.5, .missing = std::move(missing)}.summary();
  const std::string begin = "its time limit of 0.5 s passed";
  CHECK(text.starts_with(begin));
  return text.substr(begin.size());
}

void few_ranks_are_listed() {
  CHECK(said_of({}).empty());
  CHECK(said_of({3}) == " while it waited for rank 3");
  CHECK(said_of({0, 1, 2}) == " while it waited for rank 0, 1, 2");
  CHECK(said_of({0, 2, 4, 6}) == " while it waited for rank 0, 2, 4, 6");
}

void a_run_of_ranks_is_one_entry() {
  CHECK(said_of({0, 1, 2, 3}) == " while it waited for rank 0-3");
  CHECK(said_of({1, 2, 5, 6, 7, 8, 10}) == " while it waited for rank 1, 2, 5-8, 10");
  std::vector<int> all(100'000);
  std::iota(all.begin(), all.end(), 0);
  CHECK(said_of(all) == " while it waited for rank 0-99999");
}

void of_many_ranks_apart_the_first_are_listed() {
  std::vector<int> odd;
  for (int rank = 1; rank < 100'000; rank += 2) odd.push_back(rank);
  const std::string text = said_of(odd);
  CHECK(text.size() < 200 && text.starts_with(" while it waited for rank 1, 3, 5, "));
  CHECK(text.ends_with(" more") && text.find(" and ") != std::string::npos);
}

void a_limit_is_said_with_three_digits() {
  const auto limit_in = [](double seconds) {
    const std::string text = Failure{.kind = Failure::Kind::kTimeout, .seconds = seconds}.summary();
    return text.substr(std::strlen("its time limit of "));
  };
  CHECK(limit_in(0.999849) == "1 s passed");
  CHECK(limit_in(599.98) == "600 s passed");
  CHECK(limit_in(1800) == "1800 s passed");
  CHECK(limit_in(0.05) == "0.05 s passed");
}

}  // namespace

int main() {
  a_limit_is_said_with_three_digits();
  few_ranks_are_listed();
  a_run_of_ranks_is_one_entry();
  of_many_ranks_apart_the_first_are_listed();
  std::puts("failure_test: passed");
}
