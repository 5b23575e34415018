// Chooses and makes the plan of a collective that is not small.
#pragma once

#include "engine/request.hpp"
#include "engine/shared_state.hpp"

namespace procgroup {

// Fills state.plan. For an all_to_all, all sheets must be there and agree.
void make_plan(SharedState& state, const Request& request);

}  // namespace procgroup
