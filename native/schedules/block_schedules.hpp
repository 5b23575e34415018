// Schedules through slots for collectives in which ranks have blocks for each other: blocks may differ in size, also be
// empty, and lie anywhere.
//
// Vocabulary, beside that of schedule.hpp. A *round* moves the next part of every block. Where a rank has another block
// for each other rank, its slot is divided into *lanes*, one per receiver, and a part is at most a lane.
#pragma once

#include "schedules/schedule.hpp"

namespace procgroup {

struct BlockScheduleRequest {
  int rank;
  int size;
  const BlockTable& blocks;
  size_t element_bytes;
  size_t chunk_bytes;  // at most a slot
  int root = -1;
  uint64_t earlier_chunks = 0;  // of all earlier calls, see SlotScheduleRequest
};

// gather, all_gather: inputs have no blocks, outputs one per rank. scatter, reduce_scatter: inputs one per rank.
void schedule_gather(const BlockScheduleRequest& request, Schedule& schedule);
void schedule_all_gather(const BlockScheduleRequest& request, Schedule& schedule);
void schedule_scatter(const BlockScheduleRequest& request, Schedule& schedule);
void schedule_reduce_scatter(const BlockScheduleRequest& request, Schedule& schedule);
void schedule_all_to_all(const BlockScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
