#include "runtime/wait_report.hpp"

#include <cstdio>
#include <ctime>

#include "base/clock.hpp"
#include "runtime/failure.hpp"

namespace procgroup {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

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

WaitReport::Due WaitReport::look(int64_t first_ns) { return first_ns == 0 ? Due::kNothing : look(first_ns, now_ns()); }

WaitReport::Due WaitReport::look(int64_t first_ns, int64_t now) {
  if (first_ns == 0) return Due::kNothing;
  looked_ns_ = now;
  if (since_ns_ == 0) {
    since_ns_ = now;
    next_ns_ = now + first_ns;
  }
  if (now >= next_ns_) {
    next_ns_ = now + kRepeatNs;
    asked_ = false;
    return Due::kLine;
  }
  if (asked_ || now < next_ns_ - kQuestionNs) return Due::kNothing;
  asked_ = true;
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
