// Elements that a call reads or writes in memory that the request owns: those that reduce ops prepare (see
// dtype/reduce_ops.hpp), and those of several arrays for one rank.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// Let the call read prepared elements, if its op needs them. The request owns their memory, and prepares them right
// before the call reads them.
void prepare(Request& request);

// Make one block for each rank, if there are several arrays for a rank. The request owns the memory in which their
// elements are joined, right before the call reads them. If the call succeeds, the received elements are copied into
// the arrays. Arrays on a device are only counted, because the backend has taken their addresses before.
void join_blocks(Request& request, int rank, int size, bool on_device = false);

}  // namespace procgroup
