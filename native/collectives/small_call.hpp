// Collectives whose data is beside the announcement: no slots, no schedules, one wait.
#pragma once

#include "collectives/state.hpp"
#include "ops/request.hpp"

namespace procgroup {

// The size of the largest contribution to a call; equal on all ranks. An all_to_all is not described by its
// descriptor alone: see all_to_all_is_small.
inline size_t largest_contribution(const Descriptor& call, int size) {
  const bool equal_blocks = has_input_blocks(call.op) && call.splits == 0;
  return equal_blocks ? call.bytes() * static_cast<size_t>(size) : call.bytes();
}

// Put this rank's elements beside its announcement, before it is announced.
void copy_in_small(CollectiveState& state, const Request& request);
// When all agree: make the outputs from the data that all ranks have copied in.
void finish_small(CollectiveState& state, const Request& request);

// all_to_all: every rank writes its buffer table and, if they fit, its elements; when all have announced the call,
// every rank knows from the counts whether those of all ranks fit.
void copy_in_all_to_all(CollectiveState& state, const Request& request);
bool all_to_all_is_small(const CollectiveState& state, const Descriptor& call);

}  // namespace procgroup
