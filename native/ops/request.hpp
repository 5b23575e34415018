// A caller's request: the call and the arrays, as addresses. Arrays outlive the operation.
//
//                    input          inputs                    output             outputs
//   broadcast        the array      -                         the same array     -
//   reduce           the array      -                         the root's array   -
//   all_reduce       the array      -                         the same array     -
//   gather           the array      -                         -                  on the root: one block per rank
//   all_gather       the array      -                         -                  one block per rank
//   scatter          -              on the root: one a rank   the array          -
//   reduce_scatter   -              one block per rank        the array          -
//   all_to_all       -              one block per rank        -                  one block per rank
//
// Blocks are in group-rank order; they may be anywhere in memory, also side by side in one array. The input, or this
// rank's input block, may have the same address as the output, or as this rank's output block; nothing else overlaps.
//
// An operation by pair may have several arrays for one rank. Then several rows of one block per rank follow each other,
// in an order on which both ranks of a pair agree. join_blocks makes one row of them, which is what the engine moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/iovec.hpp"
#include "ops/descriptor.hpp"
#include "ops/task.hpp"

namespace procgroup {

// The elements that one rank sends to, or receives from, one other. Input blocks are never written.
struct Block {
  void* data = nullptr;
  size_t count = 0;     // elements
  uint64_t joined = 0;  // of a block that joins two arrays: both counts, see joined_counts

  // What ranks announce of it, and compare.
  uint64_t announced() const { return joined != 0 ? joined : count; }
};

// The counts of two arrays of one block, in one word that no count has.
inline constexpr uint64_t kJoined = uint64_t{1} << 63;
inline constexpr size_t kMostJoined = (size_t{1} << 31) - 1;
constexpr uint64_t joined_counts(size_t first, size_t second) { return kJoined | uint64_t{first} << 31 | second; }
constexpr size_t first_joined(uint64_t announced) { return announced >> 31 & kMostJoined; }
constexpr size_t second_joined(uint64_t announced) { return announced & kMostJoined; }

// Whether a rank has announced two counts. Only calls whose descriptor has `splits` may join arrays.
constexpr bool is_joined(const Descriptor& call, uint64_t announced) {
  return call.splits != 0 && (announced & kJoined) != 0;
}
// The elements of a block of which a rank has announced this.
constexpr uint64_t announced_count(const Descriptor& call, uint64_t announced) {
  return is_joined(call, announced) ? first_joined(announced) + second_joined(announced) : announced;
}

// A hash of how many elements each of them has, in this order; never zero.
inline uint64_t hash_of_sizes(const std::vector<Block>& blocks) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  for (const Block& block : blocks) {
    hash = (hash ^ block.count) * 0x100000001b3;
    hash ^= hash >> 32;
  }
  return hash | 1;
}

struct Request {
  Descriptor descriptor;        // group and sequence are filled in when the call starts
  uint32_t source = 0;          // number of the source line that issued it: see Recorder
  const void* input = nullptr;  // this rank's elements; null where the table has none
  void* output = nullptr;
  std::vector<Block> inputs;
  std::vector<Block> outputs;
  // If not empty, the input is the concatenation of these; only in calls that CallQueue::takes_iovecs allows.
  std::vector<Iovec> iovecs;
  // Run by the thread that runs the call, without the language's lock: `before` right before its first element is
  // read, `after` when it succeeded. Both are empty for contiguous arrays and ops that prepare nothing.
  std::function<void()> before;
  std::function<void()> after;
  // The factor of PREMUL_SUM, by which inputs are multiplied; 1 of other ops.
  double factor = 1.0;
  // Not begun before the work of earlier collectives on a device has completed.
  bool after_device_work = false;
  // It moves the bytes where `descriptor.external`; else the engine does, and it is started after that. Null for most.
  std::shared_ptr<Task> task;
  // No caller waits for the call: its failure is raised by the group's next call.
  bool is_unawaited = false;
};

}  // namespace procgroup
