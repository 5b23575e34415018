// When a call that waits is reported, and in which words.
#include "runtime/wait_report.hpp"

#include <utility>
#include <vector>

#include "tests/check.hpp"

using namespace procgroup;

namespace {

using Due = WaitReport::Due;

constexpr int64_t kSecond = 1'000'000'000;
constexpr double kUnlimited = 1e12;

void a_line_is_due_after_the_first_interval_and_then_once_a_minute() {
  constexpr int64_t kFirst = 10 * kSecond;
  WaitReport report;
  int64_t start = 5;
  const auto look = [&](int64_t now) { return report.look(kFirst, kUnlimited, now, {}); };
  CHECK(look(start) == Due::kNothing);
  CHECK(look(start + 9 * kSecond) == Due::kNothing);
  CHECK(look(start + kFirst - WaitReport::kQuestionNs) == Due::kQuestion);
  CHECK(look(start + kFirst - 1) == Due::kNothing);
  CHECK(look(start + kFirst) == Due::kLine);
  CHECK(report.waited_ns() == kFirst);
  start += kFirst;
  CHECK(look(start + 59 * kSecond) == Due::kNothing);
  CHECK(look(start + WaitReport::kRepeatNs - 1) == Due::kQuestion);
  CHECK(look(start + WaitReport::kRepeatNs) == Due::kLine);
  CHECK(look(start + WaitReport::kRepeatNs + 1) == Due::kNothing);
}

void a_short_interval_asks_at_once() {
  WaitReport report;
  CHECK(report.look(kSecond / 10, kUnlimited, 1, {}) == Due::kQuestion);
  CHECK(report.look(kSecond / 10, kUnlimited, 1 + kSecond / 10, {}) == Due::kLine);
}

void a_question_comes_before_the_end_of_the_wait_too() {
  WaitReport both;
  const auto look = [&](int64_t now) { return both.look(5 * kSecond, 8, 1 + now, {}); };
  CHECK(look(0) == Due::kNothing);
  CHECK(look(5 * kSecond - WaitReport::kQuestionNs) == Due::kQuestion);
  CHECK(look(5 * kSecond) == Due::kLine);
  CHECK(look(8 * kSecond - WaitReport::kQuestionNs - 1) == Due::kNothing);
  CHECK(look(8 * kSecond - WaitReport::kQuestionNs) == Due::kQuestion);
  CHECK(look(8 * kSecond) == Due::kNothing);
  WaitReport brief;
  CHECK(brief.look(0, 0.4, 1, {}) == Due::kNothing);
  CHECK(brief.look(0, 0.4, 1 + kSecond / 5, {}) == Due::kQuestion);
  CHECK(brief.look(0, 0.4, 1 + 2 * kSecond / 5, {}) == Due::kNothing);
}

void a_wait_in_which_elements_move_begins_anew() {
  WaitReport report;
  const auto look = [&](int64_t now, uint64_t moved) {
    return report.look(5 * kSecond, kUnlimited, 1 + now, {{1}, moved, false});
  };
  CHECK(look(0, 0) == Due::kNothing);
  uint64_t moved = 0;
  for (int second = 1; second <= 60; ++second) CHECK(look(second * kSecond, ++moved) == Due::kNothing);
  CHECK(look(65 * kSecond - WaitReport::kQuestionNs, moved) == Due::kQuestion);
  CHECK(look(65 * kSecond, moved) == Due::kLine && report.waited_ns() == 5 * kSecond);
  CHECK(look(66 * kSecond, ++moved) == Due::kNothing);
  CHECK(look(71 * kSecond - 1, moved) == Due::kQuestion && look(71 * kSecond, moved) == Due::kLine);
  CHECK(!report.note_own_moves(0) && report.note_own_moves(7) && !report.note_own_moves(7));
}

void a_rank_that_arrives_does_not_restart_the_wait_for_the_others() {
  WaitReport report;
  const auto look = [&](int64_t now, std::vector<int> awaited, uint64_t moves, bool has_own = false) {
    return report.look(5 * kSecond, kUnlimited, 1 + now, {std::move(awaited), moves, has_own});
  };
  CHECK(look(0, {1, 2}, 30) == Due::kNothing);
  CHECK(look(4 * kSecond, {2}, 10) == Due::kNothing);  // rank 1 has come, which had moved elements of earlier calls
  CHECK(look(5 * kSecond - WaitReport::kQuestionNs, {3}, 12) == Due::kQuestion);
  CHECK(look(5 * kSecond, {3}, 12) == Due::kLine && report.waited_ns() == 5 * kSecond);
  CHECK(look(6 * kSecond, {1}, 7, true) == Due::kNothing);
  CHECK(look(11 * kSecond, {1}, 7) == Due::kLine && report.waited_ns() == 5 * kSecond);
}

void zero_is_never() {
  WaitReport report;
  CHECK(report.look(0, kUnlimited, 1, {}) == Due::kNothing);
  CHECK(report.look(0, kUnlimited, 1000 * kSecond, {}) == Due::kNothing);
  CHECK(report.look(0, kUnlimited, {}) == Due::kNothing);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void the_line_names_ranks_call_and_what_the_ranks_are_doing() {
  const WaitingCall one{.rank = 0, .name = "barrier #2 on group 0", .awaited = {3}, .waited_ns = 10 * kSecond};
  const std::string line = describe_wait(one, {"in no call for 12 s"});
  CHECK(line.starts_with("rank 0 has waited 10 s (since "));
  CHECK(ends_with(line, ") for rank 3 in barrier #2 on group 0: rank 3 is in no call for 12 s"));
  const WaitingCall many{
      .rank = 1, .name = "barrier #2 on group 0", .awaited = {0, 2, 3, 4, 5}, .waited_ns = 70 * kSecond};
  CHECK(ends_with(describe_wait(many, {"in A", "in B"}),
                  ") for ranks 0, 2-5 in barrier #2 on group 0: rank 0 is in A; rank 2 is in B"));
  const WaitingCall any{.rank = 1, .name = "recv #2 on group 0", .awaited = {}, .waited_ns = 70 * kSecond};
  CHECK(ends_with(describe_wait(any, {}), ") for any other rank in recv #2 on group 0"));
}

}  // namespace

int main() {
  RUN_TEST(a_line_is_due_after_the_first_interval_and_then_once_a_minute);
  RUN_TEST(a_short_interval_asks_at_once);
  RUN_TEST(a_question_comes_before_the_end_of_the_wait_too);
  RUN_TEST(a_wait_in_which_elements_move_begins_anew);
  RUN_TEST(a_rank_that_arrives_does_not_restart_the_wait_for_the_others);
  RUN_TEST(zero_is_never);
  RUN_TEST(the_line_names_ranks_call_and_what_the_ranks_are_doing);
}
