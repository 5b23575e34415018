// What made an operation fail, as data. The bindings turn it into an exception of procgroup.errors.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ops/descriptor.hpp"

namespace procgroup {

// How a rank is lost that has left in order.
inline constexpr const char* kEndedWithoutError = "its program ended without an error, and never made this call";

// The kinds of failures: the next eight structures, in their order.
enum class FailureKind : uint8_t { kMismatch, kTimeout, kLost, kFailed, kBroken, kInterrupted, kAborted, kDeadlock };

// The ranks made different calls.
struct Mismatch {
  std::vector<std::string> calls{};  // by group rank, what each called; empty in a failed transfer
  std::string reason{};              // what differs, where that is more than the calls say
  int peer = -1;                     // of a message: the rank that sent it
};

struct Timeout {
  double seconds = 0;                // the limit that passed
  std::vector<int> missing{};        // the ranks that have not arrived
  std::vector<int> relays{};         // those that have, but may not have relayed the announcements of `missing`
  std::string reason{};              // what is awaited, if not `missing` alone
  std::vector<std::string> calls{};  // what the first of `missing`, and then each of `relays`, is doing
};

// The process of a rank has ended.
struct Lost {
  int peer = -1;
  int64_t pid = 0;
  std::string host{};    // where that process ran; empty when it is this host
  std::string reason{};  // how it ended
  bool left = false;     // whether it has left in order, as far as this rank has seen it itself
};

// A rank has ended its part in the group, or broke the protocol.
struct Failed {
  int peer = -1;
  std::string reason{};
  // What failed on that rank; kFailed itself is an error of its program, or a breach of the protocol.
  FailureKind cause = FailureKind::kFailed;
  double seconds = 0;          // of a timeout on that rank, as the next
  std::vector<int> missing{};  // ranks whose calls that timeout ended add those that they awaited
  bool sudden = false;         // of a process that ends: whether every call in which it takes part fails now
};

// The group cannot be used any more on this rank.
struct Broken {
  std::string reason{};
};

struct Interrupted {};
struct Aborted {};

struct Deadlock {
  std::vector<int> ranks{};          // world ranks, the lowest first
  std::vector<std::string> calls{};  // the call in which each of them waits
  std::string reason{};              // both, as a clause
};

class Failure {
 public:
  using Variant = std::variant<Mismatch, Timeout, Lost, Failed, Broken, Interrupted, Aborted, Deadlock>;

  template <class Kind>
    requires(!std::same_as<std::remove_cvref_t<Kind>, Failure> && std::constructible_from<Variant, Kind>)
  Failure(Kind&& kind) : variant(std::forward<Kind>(kind)) {}  // NOLINT: each of its kinds is a failure

  FailureKind kind() const { return static_cast<FailureKind>(variant.index()); }
  template <class... Kinds>
  bool is() const {
    return (std::holds_alternative<Kinds>(variant) || ...);
  }
  // Null if it is another kind of failure.
  template <class Kind>
  Kind* as() {
    return std::get_if<Kind>(&variant);
  }
  template <class Kind>
  const Kind* as() const {
    return std::get_if<Kind>(&variant);
  }

  // The rank that caused it: the peer that was lost, has failed, or sent what differs; -1: none.
  int culprit() const;
  // The text and the missing ranks of the kinds that have them.
  std::string reason() const;
  std::vector<int> missing() const;
  // Replace the numbers of the culprit and of the missing ranks; -1 leaves a missing rank out.
  void renumber(const std::function<int(int)>& number);
  // One clause for other ranks and for later calls: "lost rank 1 (pid 42): its process ended".
  std::string summary(const std::vector<int>* global_ranks = nullptr) const;

  Variant variant;
  Descriptor call{};     // the call that failed, on the rank where it failed; number 0 when there is none
  bool wrote = false;    // whether the call may have written to an array of its caller
  bool relayed = false;  // whether another member has posted it, to all members
  std::string note{};    // a further clause of this rank's own error, which is not sent to other ranks
};

// What a failure that group rank `member` has posted means to the other ranks: the loss or failure of a third rank is
// passed on, so that all ranks name the same cause; everything else is a failure of the member. `reader` is the rank
// that reads it.
Failure as_seen_by(int reader, int member, Failure posted, const std::vector<int>* global_ranks);

// "rank 1" or "ranks 1, 2, 5-9": short for a world of any size in which few ranks have come, or few are missing. With
// global ranks that differ (see rank_name): "ranks 3, 5 (ranks 1, 2 of the group)".
std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>* global_ranks = nullptr);

// What another rank wrote, up to `most` bytes or its first zero, in characters that every reader can take.
std::string readable(const char* text, size_t most);

}  // namespace procgroup
