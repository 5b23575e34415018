#include "runtime/call_report.hpp"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "base/clock.hpp"
#include "runtime/failure.hpp"

namespace procgroup {
namespace {

// Of a rank with many asynchronous calls, so many are named.
constexpr size_t kNamedCalls = 2;

std::string describe_awaited(const AwaitedRanks& awaited) {
  if (awaited.count == 0) return "";
  return ", waiting for " +
         (awaited.ranks.empty() ? std::to_string(awaited.count) + " ranks" : name_ranks(awaited.ranks));
}

std::string describe_call(const Record& record, uint64_t asking, const FindGroup& find_group,
                          const FindSourceLine& find_source_line, const FindAwaited& find_awaited) {
  const NamedGroup group = find_group(record.call.group);
  const std::string line = short_line(find_source_line(record.source));
  const std::string at = line.empty() ? "" : " at " + line;
  if (record.call.op == kMakesGroup) return record.call.describe() + " of " + group.members + at;
  std::string text = record.call.describe(&group.global_ranks) + " (call #" + std::to_string(record.call.sequence);
  if (record.call.group != asking) text += group.name.empty() ? " on another group" : " on group " + group.name;
  if (record.state == CallState::kStarted) text += describe_awaited(find_awaited(record.call));
  return text + ")" + at;
}

// Whether a frame is the program's own, and neither Python's nor a library's. Stacks have none of procgroup's.
bool is_program(const std::string& line) {
  return line.find("/lib/python3") == std::string::npos && line.find("<frozen ") == std::string::npos;
}

// `  File "/home/me/data.py", line 88 in load` as "load (data.py:88)"; empty when it is no such line.
std::string describe_frame(const std::string& line) {
  constexpr std::string_view kFile = "  File \"";
  constexpr std::string_view kLine = "\", line ";
  constexpr std::string_view kIn = " in ";
  const size_t name = line.find(kLine);
  const size_t number = name == std::string::npos ? name : name + kLine.size();
  const size_t in = number == std::string::npos ? number : line.find(kIn, number);
  if (!line.starts_with(kFile) || in == std::string::npos) return "";
  const std::string path = line.substr(kFile.size(), name - kFile.size());
  return line.substr(in + kIn.size()) + " (" + short_line(path) + ":" + line.substr(number, in - number) + ")";
}

std::string describe_seconds(int64_t nanoseconds) {
  const double seconds = static_cast<double>(std::max<int64_t>(nanoseconds, 0)) / 1e9;
  char text[32];
  std::snprintf(text, sizeof text, seconds < 9.95 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

}  // namespace

std::string name_members(const RecordedGroup& group) {
  return group.members.empty() ? std::to_string(group.size) + " ranks" : name_ranks(group.members);
}

std::string short_line(const std::string& line) { return line.substr(line.rfind('/') + 1); }

uint32_t find_source(const FlightRecordView& record, const Descriptor& call) {
  uint32_t source = 0;
  for (const Record& one : record.calls()) {
    const bool is_kind = is_message(call.op) ? one.call.op == call.op : !is_message(one.call.op);
    if (is_kind && one.call.group == call.group && one.call.sequence == call.sequence) source = one.source;
  }
  return source;
}

std::string find_line(const FlightRecordView& record, const Descriptor& call) {
  return record.call_site(find_source(record, call));
}

std::string find_line_of_wait(const FlightRecordView& record, OpKind op) {
  uint32_t source = 0;
  uint64_t group = 0;
  for (const Record& one : record.calls())
    if (one.call.op == op && one.state == CallState::kStarted) source = one.source, group = one.call.group;
  std::string line = record.call_site(source);
  if (op != kMakesGroup || line.empty()) return line;
  for (const RecordedGroup& one : record.groups())
    if (one.identity == group) return line + " (a group of " + name_members(one) + ")";
  return line;
}

bool is_in_call(const std::vector<Record>& records) {
  return std::ranges::any_of(records, [](const Record& record) { return record.state == CallState::kStarted; });
}

std::string describe_calls(const std::vector<Record>& records, uint64_t asking, const FindGroup& find_group,
                           const FindSourceLine& find_source_line, const FindAwaited& find_awaited) {
  const auto describe = [&](const Record& record) {
    return describe_call(record, asking, find_group, find_source_line, find_awaited);
  };
  std::string text;
  size_t running = 0;
  const Record* last = nullptr;
  for (const Record& record : records) {
    if (record.ended_ns != 0 && (last == nullptr || record.ended_ns > last->ended_ns)) last = &record;
    if (record.state != CallState::kStarted) continue;
    if (++running <= kNamedCalls) text += (text.empty() ? "in " : " and ") + describe(record);
  }
  if (running > kNamedCalls) text += " and " + std::to_string(running - kNamedCalls) + " more calls";
  if (running > 0) return text;
  if (last == nullptr) return "in no call, and has made none yet";
  return "in no call for " + describe_seconds(now_ns() - last->ended_ns) + "; its last was " + describe(*last);
}

std::string describe_stack(const std::string& stack) {
  std::istringstream lines(stack);
  std::string innermost;
  std::string caller;
  for (std::string line; std::getline(lines, line);) {
    const std::string frame = describe_frame(readable(line.data(), line.size()));
    if (frame.empty()) continue;
    if (innermost.empty()) {
      innermost = frame;
      continue;
    }
    if (caller.empty() || is_program(line)) caller = frame;
    if (is_program(line)) break;
  }
  if (innermost.empty()) return "";
  return "in " + innermost + (caller.empty() ? "" : ", called by " + caller);
}

}  // namespace procgroup
