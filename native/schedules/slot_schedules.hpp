// Schedules for large collectives of whole arrays through shared-memory slots: pure arithmetic, executed elsewhere.
//
// The vocabulary is that of schedule.hpp.
//
//     direct:                                reduce-scatter + all-gather:
//       copy in k | publish | await all         await all | reduce my segment of k into output and slot |
//       reduce chunk k of all slots             copy in k+1 | collect the others' segments of k-1 | publish
//                                               (one wait per chunk: a chunk's results and the next chunk's
//                                               copies in are published together)
//
// Why no slot is overwritten too early is said at each schedule.
#pragma once

#include "ops/operations.hpp"
#include "schedules/schedule.hpp"

namespace procgroup {

// What a schedule is made for: `bytes` per rank, in elements of `element_bytes`; chunks of at most `chunk_bytes`.
struct SlotScheduleRequest {
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

void schedule_all_reduce_direct(const SlotScheduleRequest& request, Schedule& schedule);
void schedule_all_reduce_scattered(const SlotScheduleRequest& request, Schedule& schedule);
// For 2 ranks. Chunks may be twice as long as a slot: each slot takes half of one.
void schedule_all_reduce_exchanged(const SlotScheduleRequest& request, Schedule& schedule);
// Every other operation on one array.
void schedule_slots(OpKind op, const SlotScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
