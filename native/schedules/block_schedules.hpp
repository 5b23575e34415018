// Schedules through slots for collectives in which ranks have blocks for each other. Blocks may be of different sizes,
// empty, and anywhere in memory.
//
// Vocabulary, beside that of schedule.hpp. A *round* moves the next part of every block. Where a rank has a different
// block for each other rank, its slot is divided into *lanes*, one per receiver, and a part is at most a lane.
#pragma once

#include "schedules/schedule.hpp"

namespace procgroup {

// gather, all_gather: inputs have no blocks, outputs one per rank. scatter, reduce_scatter: inputs one per rank.
// all_to_all: both.
void schedule_blocks(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
