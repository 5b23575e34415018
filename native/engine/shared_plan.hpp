// Chooses and makes the plan of a collective that is not small.
#pragma once

#include "engine/request.hpp"
#include "engine/shared_state.hpp"

namespace procgroup {

// Fills state.plan, when all ranks have announced the call and agree.
void make_plan(SharedState& state, const Request& request);
// The same as soon as this rank's sheet is written, if the others' cannot change the plan; false when they can.
bool make_plan_early(SharedState& state, const Request& request);

}  // namespace procgroup
