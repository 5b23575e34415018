// Schedules for large collectives of whole arrays through shared-memory slots: pure arithmetic, executed elsewhere.
//
// The vocabulary is that of schedule.hpp.
//
//     direct:                                reduce-scatter + all-gather:
//       copy in k | publish | await all         await all | reduce my segment of k into output and slot |
//       reduce chunk k of all slots             copy in k+1 | copy out the others' segments of k-1 | publish
//                                               (one wait per chunk: a chunk's results and the next chunk's
//                                               copies in are published together)
//
// Why no slot is overwritten too early is said at each schedule.
#pragma once

#include "schedules/schedule.hpp"

namespace procgroup {

void schedule_all_reduce_scattered(const ScheduleRequest& request, Schedule& schedule);
// For 2 ranks. Chunks may be twice as long as a slot: each slot takes half of one.
void schedule_all_reduce_exchanged(const ScheduleRequest& request, Schedule& schedule);
// Every operation on one array; an all_reduce is direct.
void schedule_slots(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
