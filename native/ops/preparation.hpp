// Elements that a call reads or writes in memory of the request's own: those that reduce ops prepare (see
// dtype/reduce_ops.hpp), and those of several arrays for one rank.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// Let the call read prepared elements, if its op needs such: in memory of the request's own, made right before the call
// reads them.
void prepare(Request& request);

// Make one block for each rank, if there are several arrays for a rank. Their elements are joined in memory of the
// request's own right before the call reads them, and what has come is copied into the arrays when the call has gone
// well. Arrays on a device are only counted: who moves them has taken their addresses before.
void join_blocks(Request& request, int rank, int size, bool on_device = false);

}  // namespace procgroup
