// Schedules in which ranks read each other's arrays in place: one copy, no slots.
//
// Nobody writes another's array. A rank publishes when it has read what it needs; a rank whose array others read ends
// its call only after they have published. all_reduce, in which results are read too:
//
//     read my segment of chunk k of all arrays, and reduce it into my output | publish k+1
//     for each other rank: await its k+1 | read its segment of chunk k from its output
//
// In place, a rank overwrites its own segment, which only it reads, and then the segments of ranks that have published,
// and so have read them: no element is overwritten before everybody has done with it.
#pragma once

#include "schedules/schedule.hpp"

namespace procgroup {

void schedule_reading(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
