// What made an operation fail, as data. The bindings turn it into an exception of procgroup.errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace procgroup {

struct Failure {
  enum class Kind : uint8_t { kMismatch, kTimeout, kLost, kFailed, kBroken, kInterrupted, kAborted, kDeadlock };
  Kind kind;
  int peer = -1;               // kLost, kFailed: the group rank
  int64_t pid = 0;             // kLost
  std::string reason{};        // kLost: how; kFailed, kBroken: the text
  double seconds = 0;          // kTimeout: the limit that passed
  std::vector<int> missing{};  // kTimeout: group ranks that have not arrived; kDeadlock: world ranks
  // kMismatch: by group rank, what each called; kDeadlock, kTimeout: for each of `missing`, or the first of them
  std::vector<std::string> calls{};
  bool wrote = false;  // whether the call may have written to an array of its caller

  // One clause for other ranks and for later calls: "lost rank 1 (pid 42): its process ended".
  std::string summary(const std::vector<int>* global_ranks = nullptr) const;
};

// "1, 2, 5-9": short for a world of any size in which few ranks have come, or few are missing.
std::string join_ranks(const std::vector<int>& ranks);

// What another rank wrote, up to `most` bytes or its first zero, in characters that every reader can take.
std::string readable(const char* text, size_t most);

}  // namespace procgroup
