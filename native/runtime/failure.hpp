// What made an operation fail, as data. The bindings turn it into an exception of procgroup.errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/descriptor.hpp"

namespace procgroup {

// How a rank is lost that has left in order.
inline constexpr const char* kEndedWithoutError = "its program ended without an error, and never made this call";

struct Failure {
  enum class Kind : uint8_t { kMismatch, kTimeout, kLost, kFailed, kBroken, kInterrupted, kAborted, kDeadlock };
  Kind kind;
  int peer = -1;         // kLost, kFailed: the group rank
  int64_t pid = 0;       // kLost
  std::string host{};    // kLost: where that process ran; empty when it is this host
  std::string reason{};  // kLost: how; kFailed, kBroken: the text; kTimeout: what is awaited, if not `missing` alone
  double seconds = 0;    // kTimeout: the limit that passed
  std::vector<int> missing{};  // kTimeout: group ranks that have not arrived; kDeadlock: world ranks
  std::vector<int> relays{};   // kTimeout: those that have, but may not have relayed the announcements of `missing`
  // kMismatch: by group rank, what each called; kDeadlock, kTimeout: for each of `missing`, or the first of them, and
  // then for each of `relays`
  std::vector<std::string> calls{};
  std::string note{};  // a further clause of this rank's own error, which is not sent to other ranks
  bool left = false;   // kLost: whether that rank has left in order, as far as this one has seen it itself
  bool wrote = false;  // whether the call may have written to an array of its caller
  // kFailed: what failed on that rank; kFailed itself is an error of its program, or a breach of the protocol. Then
  // `call` and `seconds` are that rank's, and so is `missing`, to which ranks whose calls a timeout ended add those
  // that they awaited.
  Kind cause = Kind::kFailed;
  Descriptor call{};     // the call that failed, on the rank where it failed; number 0 when there is none
  bool relayed = false;  // whether another member has posted it, to all members
  bool sudden = false;   // of a process that ends: whether every call in which it takes part fails now

  // One clause for other ranks and for later calls: "lost rank 1 (pid 42): its process ended".
  std::string summary(const std::vector<int>* global_ranks = nullptr) const;
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
