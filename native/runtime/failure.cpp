#include "runtime/failure.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ops/descriptor.hpp"

namespace procgroup {
namespace {

// A list of ranks in a text gets about this long.
constexpr size_t kListBytes = 140;
constexpr size_t kShortestRun = 4;

// Three digits: what a part of a call has left of the timeout that was passed is no round number.
std::string rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", seconds);
  std::snprintf(text, sizeof text, "%g", std::strtod(text, nullptr));
  return text;
}

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t begin = 0; begin < ranks.size();) {
    if (text.size() > kListBytes) return text + " and " + std::to_string(ranks.size() - begin) + " more";
    size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - begin < kShortestRun) end = begin + 1;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[begin]);
    if (end - begin > 1) text += "-" + std::to_string(ranks[end - 1]);
    begin = end;
  }
  return text;
}

// ": rank 0 called barrier, rank 2 called ...": the first rank of each call, for a few calls.
std::string different_calls(const std::vector<std::string>& calls, const std::vector<int>* global_ranks) {
  std::string text;
  for (auto call = calls.begin(); call != calls.end() && text.size() < kListBytes; ++call) {
    if (call->empty() || std::find(calls.begin(), call, *call) != call) continue;
    text += (text.empty() ? ": " : ", ") + rank_name(static_cast<int>(call - calls.begin()), global_ranks) +
            " called " + *call;
  }
  return text;
}

}  // namespace

std::string name_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + join_ranks(ranks);
}

std::string Failure::summary(const std::vector<int>* global_ranks) const {
  switch (kind) {
    case Kind::kMismatch:
      return "the ranks made different calls" + different_calls(calls, global_ranks);
    case Kind::kTimeout:
      if (!reason.empty()) return "its time limit of " + rounded(seconds) + " s passed while it waited for " + reason;
      return "its time limit of " + rounded(seconds) + " s passed" +
             (missing.empty() ? "" : " while it waited for " + name_ranks(missing)) +
             (missing.empty() || global_ranks == nullptr || global_ranks->empty() ? "" : " of the group");
    case Kind::kLost:
      return "lost " + rank_name(peer, global_ranks) + " (pid " + std::to_string(pid) +
             (host.empty() ? "" : " on " + host) + "): " + reason;
    case Kind::kFailed:
      return rank_name(peer, global_ranks) + " failed: " + reason;
    case Kind::kBroken:
      return reason;
    case Kind::kInterrupted:
      return "interrupted by a signal";
    case Kind::kAborted:
      return "aborted";
    case Kind::kDeadlock: {
      if (calls.empty()) return reason;
      std::string text;
      for (size_t index = 0; index < missing.size(); ++index)
        text += (index == 0 ? "deadlock: rank " : ", rank ") + std::to_string(missing[index]) + " in " + calls[index];
      return text;
    }
  }
  return "unknown";
}

Failure as_seen_by(int reader, int member, Failure posted, const std::vector<int>* global_ranks) {
  const bool has_cause = posted.kind == Failure::Kind::kLost || posted.kind == Failure::Kind::kFailed;
  if (has_cause && posted.peer >= 0 && posted.peer != reader) return posted;
  if (!has_cause) posted.cause = posted.kind;
  const bool has_text = posted.kind == Failure::Kind::kMismatch && !posted.reason.empty();
  if (!has_text) posted.reason = posted.summary(global_ranks);
  posted.kind = Failure::Kind::kFailed;
  posted.peer = member;
  return posted;
}

std::string readable(const char* text, size_t most) {
  std::string copy(text, strnlen(text, most));
  std::ranges::replace_if(copy, [](char one) { return one < ' ' || one > '~'; }, '?');
  return copy;
}

}  // namespace procgroup
