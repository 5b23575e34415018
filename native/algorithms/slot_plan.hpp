// Plans for large collectives through shared-memory slots: pure arithmetic, executed elsewhere.
//
// Vocabulary. An array is handled in *chunks*. A rank *deposits* a chunk in one of its own slots and
// *publishes*: its progress counter rises to a value. Others *await* that value, then reduce or collect
// (copy out) what lies in the slot. Values count from the start of the call.
//
//     direct:                                reduce-scatter + all-gather:
//       deposit k | publish | await all         await all | reduce my segment of k into output and slot |
//       reduce chunk k of all slots             deposit k+1 | collect the others' segments of k-1 | publish
//                                               (one wait per chunk: a chunk's results and the next chunk's
//                                               deposits are published together)
//
// Why no slot is overwritten too early is said at each plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/group_memory.hpp"

namespace procgroup {

inline constexpr int kEveryone = -1;

// A range of bytes that a step reads or writes.
struct Place {
  enum class Kind : uint8_t { kInput, kOutput, kSlot };
  Kind kind;
  int8_t slot = 0;    // kSlot
  int32_t rank = 0;   // kSlot: whose; kOutput: which output (all_gather has one per rank)
  size_t offset = 0;  // in bytes
};

struct Step {
  enum class Kind : uint8_t {
    kCopy,     // from -> to
    kReduce,   // in rank order: `own` of this rank, `from` of every other -> to
    kPublish,  // my progress := value
    kAwait,    // until progress of `rank` (or of kEveryone) >= value
  };
  Kind kind;
  int32_t rank = 0;
  uint64_t value = 0;
  size_t bytes = 0;
  Place to{};
  Place from{};
  Place own{};   // kReduce
  Place also{};  // kReduce: where the result goes too, when has_also
  bool has_also = false;
};

struct SlotPlan {
  std::vector<Step> steps;
  uint64_t published = 0;  // the last value that every rank publishes in this call
  uint64_t chunks = 0;

  void clear() {
    steps.clear();
    published = 0;
    chunks = 0;
  }
};

// What a plan is made for: `bytes` per rank, in elements of `element_bytes`; chunks of at most `chunk_bytes`.
struct SlotPlanRequest {
  int rank;
  int size;
  size_t bytes;
  size_t element_bytes;
  size_t chunk_bytes;
  int root = -1;
  // Chunks of all earlier calls: slots are used in turn from call to call. A slot that a peer has just read
  // is the slowest to write again, because its lines are still in the peer's first-level cache (measured:
  // 64 KiB in 13.4 us with one slot, 7.4 us with two in turn).
  uint64_t earlier_chunks = 0;
};

void plan_all_reduce_direct(const SlotPlanRequest& request, SlotPlan& plan);
void plan_all_reduce_scattered(const SlotPlanRequest& request, SlotPlan& plan);
// For 2 ranks. Chunks may be twice as long as a slot: each slot takes half of one.
void plan_all_reduce_exchanged(const SlotPlanRequest& request, SlotPlan& plan);
void plan_broadcast(const SlotPlanRequest& request, SlotPlan& plan);
void plan_reduce(const SlotPlanRequest& request, SlotPlan& plan);
void plan_all_gather(const SlotPlanRequest& request, SlotPlan& plan);

}  // namespace procgroup
