// Partial results: what travels from rank to rank while a reduction is under way.
//
// float16 and bfloat16 sums and products travel as float32 and are rounded once, at the end; rounding
// them at each of p - 1 ranks would lose bits at each. All else travels in its own dtype, which is exact
// or rounds no more often than its own addition does.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// The dtype in which partial results of `op` on `dtype` travel.
Dtype partial_dtype(Dtype dtype, ReduceOp op);

// partial[i] = elements[i]
void begin_partial(Dtype dtype, ReduceOp op, void* partial, const void* elements, size_t count);

// partial[i] = partial[i] op elements[i]; AVG adds.
void add_to_partial(Dtype dtype, ReduceOp op, void* partial, const void* elements, size_t count);

// out[i] = partial[i] as `dtype`; AVG divides by the number of sources first. `partial` may be overwritten.
void finish_partial(Dtype dtype, ReduceOp op, void* out, void* partial, int source_count, size_t count);

}  // namespace procgroup
