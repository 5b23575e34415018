// What each rank does with its own elements before a call combines them: see dtype/reduce_ops.hpp.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// Whether prepared elements may differ from those that were given; bools are 0 or 1 already. The factor is that of
// PREMUL_SUM, and 1 of all other ops.
constexpr bool needs_preparation(ReduceOp op, Dtype dtype, double factor) {
  const Preparation preparation = row_of(op).preparation;
  return preparation == Preparation::kFactor ? factor != 1.0
                                             : preparation == Preparation::kTruth && dtype != Dtype::kBool;
}

// out[i] = the prepared elements[i] for i < count. float16 and bfloat16 are multiplied in float32 and rounded once.
// `out` is `elements`, or does not overlap with it. Throws std::invalid_argument unless the op prepares elements of the
// dtype.
void prepare(ReduceOp op, Dtype dtype, double factor, void* out, const void* elements, size_t count);

}  // namespace procgroup
