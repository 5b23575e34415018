// Arrays exposed: during a call, the others may read this rank's arrays where they lie.
//
// A exposure begins with the announcement of the call, whose buffer table says where the arrays are. It ends when all
// who read have acknowledged, or when the owner gives the call up. The owner says the latter in its group memory before
// its user gets the arrays back. A reader may have been stopped meanwhile, for any time; so it looks there after every
// read, and what it read counts only if the exposure lasted.
#pragma once

#include "collectives/state.hpp"
#include "ops/request.hpp"

namespace procgroup {

// Write this rank's buffer table of a call; before the announcement. An array outside of the arena is exposed only when
// `exposes`: to find out whether the kernel can read it takes a system call.
void show_arrays(CollectiveState& state, const Request& request, bool exposes);
// Whether all_read() may come out true, as far as this rank's buffer table tells.
bool may_be_read(const CollectiveState& state, const Descriptor& call, size_t bytes);
// Whether all ranks' arrays are to be read where they lie; all ranks come to one answer, from the buffer tables of all.
bool all_read(const CollectiveState& state, const Descriptor& call, size_t bytes);

// Owner: end the exposure of this rank's arrays.
void end_exposure(CollectiveState& state, uint64_t sequence);
// Reader: whether what was read of this rank's arrays before now counts.
bool is_exposed(const CollectiveState& state, int rank, uint64_t sequence);

}  // namespace procgroup
