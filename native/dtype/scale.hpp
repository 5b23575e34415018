// Multiplying elements by a number: what each rank does with its own for PREMUL_SUM.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// out[i] = elements[i] * factor for i < count. Floating point and complex dtypes only; float16 and bfloat16 are
// multiplied in float32 and rounded once. `out` is `elements`, or does not overlap with it.
void scale(Dtype dtype, void* out, const void* elements, double factor, size_t count);

}  // namespace procgroup
