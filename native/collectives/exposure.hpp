// Exposure: during a call, the other ranks may read this rank's arrays in place.
//
// An exposure begins with the announcement of the call, whose buffer table has the arrays' addresses. It ends when all
// readers have acknowledged, or when the owner gives the call up. The owner records the latter in its group memory
// before its user gets the arrays back. A reader may have been stopped meanwhile, for any time; so it checks that
// record after every read, and uses the data only if the exposure had not ended.
#pragma once

#include "collectives/state.hpp"
#include "ops/request.hpp"

namespace procgroup {

// Write this rank's buffer table of a call; before the announcement. An array outside of the arena is exposed only when
// `exposes`: the test whether the kernel can read it takes a system call.
void show_arrays(CollectiveState& state, const Request& request, bool exposes);
// Whether all_read() may return true, judged by this rank's buffer table alone.
bool may_be_read(const CollectiveState& state, const Descriptor& call, size_t bytes);
// Whether the arrays of all ranks are read in place; computed from all buffer tables, so equal on all ranks.
bool all_read(const CollectiveState& state, const Descriptor& call, size_t bytes);

// Owner: end the exposure of this rank's arrays.
void end_exposure(CollectiveState& state, uint64_t sequence);
// Reader: whether the exposure of this rank's arrays still holds, so that earlier reads are valid.
bool is_exposed(const CollectiveState& state, int rank, uint64_t sequence);

}  // namespace procgroup
