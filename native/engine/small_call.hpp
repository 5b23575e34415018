// Collectives whose data travels beside the announcement: no slots, no plans, one wait.
#pragma once

#include "engine/request.hpp"
#include "engine/shared_state.hpp"

namespace procgroup {

// What the largest contribution to a call comes to; equal on all ranks. An all_to_all is not described by its
// descriptor alone: see all_to_all_is_small.
inline size_t largest_contribution(const Descriptor& call, int size) {
  const bool equal_pieces = call.op == OpKind::kScatter || (call.op == OpKind::kReduceScatter && call.splits == 0);
  return equal_pieces ? call.bytes() * static_cast<size_t>(size) : call.bytes();
}

// Put this rank's elements beside its announcement, before it is announced.
void deposit_small(SharedState& state, const Request& request);
// When all agree: make the outputs of what all have deposited.
void finish_small(SharedState& state, const Request& request);

// all_to_all: every rank writes its sheet and, if there is room, its elements; when all have announced the call, every
// rank knows from the counts whether all had room.
void deposit_all_to_all(SharedState& state, const Request& request);
bool all_to_all_is_small(const SharedState& state, const Descriptor& call);
void finish_small_all_to_all(SharedState& state, const Request& request);

}  // namespace procgroup
