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

// Three digits: what a part of a call has left of the timeout that was passed is not a round number.
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

std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>* global_ranks) {
  const auto name = [](const std::vector<int>& some) {
    return (some.size() == 1 ? "rank " : "ranks ") + join_ranks(some);
  };
  if (global_ranks == nullptr || global_ranks->empty()) return name(ranks);
  std::vector<int> global;
  for (const int rank : ranks) global.push_back(global_ranks->at(static_cast<size_t>(rank)));
  return global == ranks ? name(ranks) : name(global) + " (" + name(ranks) + " of the group)";
}

int Failure::culprit() const {
  const auto peer_of = [](const auto& one) {
    if constexpr (requires { one.peer; })
      return one.peer;
    else
      return -1;
  };
  return std::visit(peer_of, variant);
}

std::string Failure::reason() const {
  const auto reason_of = [](const auto& one) -> std::string {
    if constexpr (requires { one.reason; })
      return one.reason;
    else
      return "";
  };
  return std::visit(reason_of, variant);
}

std::vector<int> Failure::missing() const {
  const auto missing_of = [](const auto& one) -> std::vector<int> {
    if constexpr (requires { one.missing; })
      return one.missing;
    else
      return {};
  };
  return std::visit(missing_of, variant);
}

void Failure::renumber(const std::function<int(int)>& number) {
  const auto change = [&](auto& one) {
    if constexpr (requires { one.peer; })
      if (one.peer >= 0) one.peer = number(one.peer);
    if constexpr (requires { one.missing; }) {
      for (int& missing : one.missing) missing = number(missing);
      std::erase(one.missing, -1);
    }
  };
  std::visit(change, variant);
}

std::string Failure::summary(const std::vector<int>* global_ranks) const {
  if (const auto* mismatch = as<Mismatch>())
    return "the ranks made different calls" + different_calls(mismatch->calls, global_ranks);
  if (const auto* timeout = as<Timeout>()) {
    const std::string awaited = !timeout->reason.empty()   ? timeout->reason
                                : timeout->missing.empty() ? ""
                                                           : name_ranks(timeout->missing, global_ranks);
    return "its time limit of " + rounded(timeout->seconds) + " s passed" +
           (awaited.empty() ? "" : " while it waited for " + awaited);
  }
  if (const auto* lost = as<Lost>())
    return "lost " + rank_name(lost->peer, global_ranks) + " (pid " + std::to_string(lost->pid) +
           (lost->host.empty() ? "" : " on " + lost->host) + "): " + lost->reason;
  if (const auto* failed = as<Failed>()) return rank_name(failed->peer, global_ranks) + " failed: " + failed->reason;
  if (const auto* broken = as<Broken>()) return broken->reason;
  if (const auto* deadlock = as<Deadlock>()) return deadlock->reason;
  return is<Interrupted>() ? "interrupted by a signal" : "aborted";
}

Failure as_seen_by(int reader, int member, Failure posted, const std::vector<int>* global_ranks) {
  const bool has_cause = posted.is<Lost, Failed>();
  if (has_cause && posted.culprit() >= 0 && posted.culprit() != reader) return posted;
  Failed seen{.peer = member, .reason = posted.summary(global_ranks)};
  if (!has_cause) seen.cause = posted.kind();
  if (const auto* failed = posted.as<Failed>()) {
    seen.cause = failed->cause;
    seen.seconds = failed->seconds;
    seen.missing = failed->missing;
    seen.sudden = failed->sudden;
  } else if (const auto* timeout = posted.as<Timeout>()) {
    seen.seconds = timeout->seconds;
    seen.missing = timeout->missing;
  } else if (const auto* mismatch = posted.as<Mismatch>(); mismatch != nullptr && !mismatch->reason.empty()) {
    seen.reason = mismatch->reason;
  }
  posted.variant = std::move(seen);
  return posted;
}

std::string readable(const char* text, size_t most) {
  std::string copy(text, strnlen(text, most));
  std::ranges::replace_if(copy, [](char one) { return one < ' ' || one > '~'; }, '?');
  return copy;
}

}  // namespace procgroup
