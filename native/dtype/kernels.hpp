// The table of element kernels that each instruction set provides.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// Converts `count` elements, which do not overlap what they become.
using Conversion = void (*)(void* out, const void* in, size_t count);

struct KernelTable {
  Kernel kernels[kDtypes][kReduceOps];  // null for what combining() never gives of a supported op
  Conversion widen_float16, narrow_float16, widen_bfloat16, narrow_bfloat16;
};

// float16 or bfloat16 to float32 and back, rounded to nearest even.
void widen_halves(Dtype dtype, void* out, const void* in, size_t count);
void narrow_halves(Dtype dtype, void* out, const void* in, size_t count);

namespace baseline {
const KernelTable& kernel_table();
}
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}

}  // namespace procgroup
