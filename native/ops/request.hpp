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
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/iovec.hpp"
#include "ops/descriptor.hpp"

namespace procgroup {

// The elements that one rank sends to, or receives from, one other. Input blocks are never written.
struct Block {
  void* data = nullptr;
  size_t count = 0;  // elements
};

// A hash of how many elements each of them has, in this order; never zero.
inline uint64_t hash_of_sizes(const std::vector<Block>& blocks) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  for (const Block& block : blocks) {
    hash = (hash ^ block.count) * 0x100000001b3;
    hash ^= hash >> 32;
  }
  return hash | 1;
}

// A transfer of another backend: do what can be done now, once all ranks are known to agree; true when this rank's part
// has completed. Otherwise `awaited` gets the group ranks that the transfer waits for, where the backend names them.
// `root` is the root; of a message, the other rank. `number` is the same on all ranks of the call: of a collective, its
// sequence number; of a message, the number that its sender gave to no other message. Throws what makes the call fail.
using ExternalTransfer = std::function<bool(int root, uint64_t number, std::vector<int>& awaited)>;

// Nothing wakes a waiter when another backend has moved something: this is how long it sleeps at most between two
// looks.
inline constexpr int64_t kTransferSleepNs = 200'000;

struct Request {
  Descriptor descriptor;        // group and sequence are filled in when the call starts
  uint32_t source = 0;          // number of the source line that issued it: see Recorder
  const void* input = nullptr;  // this rank's elements; null where the table has none
  void* output = nullptr;
  std::vector<Block> inputs;
  std::vector<Block> outputs;
  // If not empty, the input is the concatenation of these; only in calls that Group::takes_iovecs allows.
  std::vector<Iovec> iovecs;
  // Run by the thread that runs the call, without the language's lock: `before` right before its first element is
  // read, `after` when it succeeded. Both are empty for contiguous arrays and ops that need no factor.
  std::function<void()> before;
  std::function<void()> after;
  // The factor of PREMUL_SUM, by which the inputs are still to be multiplied; 1 where that is done.
  double factor = 1.0;
  // Where it is set, the call is not begun before it returns true. Throws what makes the call fail. Polled by the
  // thread that would begin the call.
  std::function<bool()> ready;
  // Not begun before the work of earlier collectives on a device has completed.
  bool after_device_work = false;
  ExternalTransfer transfer;  // where another backend moves the bytes (`descriptor.external`)
  // At most between two polls of the transfer, or at `ready`; 0 for a transfer that moves only while it is advanced.
  // Such a transfer may be advanced also after it has completed, because other ranks may still need it.
  int64_t transfer_sleep_ns = kTransferSleepNs;
};

}  // namespace procgroup
