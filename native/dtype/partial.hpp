// Reductions in two steps: what the ranks of one host have is reduced to *partial results*, and those of all hosts to
// the result. A partial result keeps what the one rounding at the end needs: of float16 and bfloat16 it is a float32;
// of an average it is the sum.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// Whether two steps keep the promises of reduce(). An average of integers is the exact sum, divided: its partial
// results would be wider than any dtype.
bool has_partial_results(Dtype dtype, ReduceOp op);

// Bytes of one element's partial result.
size_t partial_size(Dtype dtype, ReduceOp op);

// Reduce `count` elements of the sources, at least one, to partial results. `out` may be a source of the same width.
void reduce_to_partial(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count, size_t count);

// Reduce partial results to elements; AVG divides by `divisor`. `out` may be a source of the same width.
void reduce_partials(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count, size_t count,
                     int divisor);

}  // namespace procgroup
