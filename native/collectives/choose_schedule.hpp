// Choose and make the schedule of a collective that is not small.
#pragma once

#include "collectives/state.hpp"
#include "ops/request.hpp"

namespace procgroup {

// Fill state.schedule. Called when all ranks have announced the call and agree.
void make_schedule(CollectiveState& state, const Request& request);
// Fill state.schedule as soon as this rank's buffer table is written, unless the schedule depends on the others'
// tables; return whether it does not.
bool make_schedule_early(CollectiveState& state, const Request& request);

}  // namespace procgroup
