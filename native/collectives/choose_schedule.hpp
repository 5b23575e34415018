// Chooses and makes the schedule of a collective that is not small.
#pragma once

#include "collectives/state.hpp"
#include "ops/request.hpp"

namespace procgroup {

// Fills state.schedule, when all ranks have announced the call and agree.
void make_schedule(CollectiveState& state, const Request& request);
// The same as soon as this rank's buffer table is written, if the others' cannot change the schedule; false when they
// can.
bool make_schedule_early(CollectiveState& state, const Request& request);

}  // namespace procgroup
