#include "runtime/call_report.hpp"

#include <algorithm>
#include <cstdio>

#include "base/clock.hpp"

namespace procgroup {
namespace {

// Of a rank with many asynchronous calls, so many are named.
constexpr size_t kNamedCalls = 2;

std::string describe_call(const Record& record, uint64_t asking, const FindGroup& find_group) {
  const NamedGroup group = find_group(record.call.group);
  std::string text = record.call.describe(&group.global_ranks) + " (call #" + std::to_string(record.call.sequence);
  if (record.call.group != asking) text += group.name.empty() ? " on another group" : " on group " + group.name;
  return text + ")";
}

std::string describe_seconds(int64_t nanoseconds) {
  const double seconds = static_cast<double>(std::max<int64_t>(nanoseconds, 0)) / 1e9;
  char text[32];
  std::snprintf(text, sizeof text, seconds < 9.95 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

}  // namespace

std::string describe_calls(const std::vector<Record>& records, uint64_t asking, const FindGroup& find_group) {
  std::string text;
  size_t running = 0;
  int64_t last_end_ns = 0;
  for (const Record& record : records) {
    last_end_ns = std::max(last_end_ns, record.ended_ns);
    if (record.state != CallState::kStarted) continue;
    if (++running <= kNamedCalls) text += (text.empty() ? "in " : " and ") + describe_call(record, asking, find_group);
  }
  if (running > kNamedCalls) text += " and " + std::to_string(running - kNamedCalls) + " more calls";
  if (running > 0) return text;
  if (last_end_ns == 0) return "in no call, and has made none yet";
  return "in no call for " + describe_seconds(now_ns() - last_end_ns);
}

}  // namespace procgroup
