#include "runtime/wait_report.hpp"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <utility>

#include "runtime/failure.hpp"

namespace procgroup {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr double kLongestSeconds = 1e9;  // a longer limit is none

std::string time_of_day(int64_t nanoseconds_ago) {
  const time_t then = time(nullptr) - static_cast<time_t>(nanoseconds_ago / kSecond);
  tm local{};
  char text[16] = "";
  if (localtime_r(&then, &local) != nullptr) strftime(text, sizeof text, "%H:%M:%S", &local);
  return text;
}

std::string in_seconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, nanoseconds < kSecond ? "%.1f s" : "%.0f s", static_cast<double>(nanoseconds) / 1e9);
  return text;
}

}  // namespace

WaitReport::Due WaitReport::look(int64_t first_ns, double seconds, int64_t now, Moves moves) {
  looked_ns_ = now;
  const Moves before = std::exchange(moves_, std::move(moves));
  const bool have_others = moves_.awaited == before.awaited && moves_.theirs != before.theirs;
  if ((moves_.has_own || have_others) && since_ns_ != 0) {
    since_ns_ = now;
    if (first_ns != 0) expect_line(now + first_ns);
  }
  if (since_ns_ == 0) {
    since_ns_ = now;
    if (first_ns != 0) expect_line(now + first_ns);
    const int64_t limit_ns = seconds < kLongestSeconds ? static_cast<int64_t>(seconds * 1e9) : 0;
    if (limit_ns > 0) last_question_ns_ = now + limit_ns - std::min(kQuestionNs, limit_ns / 2);
  }
  if (now >= line_ns_) {
    expect_line(now + kRepeatNs);
    return Due::kLine;
  }
  int64_t& question_ns = now >= question_ns_ ? question_ns_ : last_question_ns_;
  if (now < question_ns) return Due::kNothing;
  question_ns = kNever;
  return Due::kQuestion;
}

std::string describe_wait(const WaitingCall& call, const std::vector<std::string>& calls) {
  const size_t count = call.awaited.size();
  std::string line = "rank " + std::to_string(call.rank) + " has waited " + in_seconds(call.waited_ns) + " (since " +
                     time_of_day(call.waited_ns) + ") for ";
  line += count == 0 ? "any other rank" : name_ranks(call.awaited);
  line += " in " + call.name;
  for (size_t index = 0; index < calls.size() && index < count; ++index)
    line += (index == 0 ? ": rank " : "; rank ") + std::to_string(call.awaited[index]) + " is " + calls[index];
  return line;
}

}  // namespace procgroup
