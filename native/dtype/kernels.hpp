// The table of element kernels that each instruction set provides, and the choice of the set: "baseline", "avx2" or
// "avx512".
//
// The best one that this processor has is chosen when the process starts. All give the same bits.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

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

const char* instruction_set();
// Those that this processor has, the best last.
std::vector<std::string> instruction_sets();
// Use this one from now on, in the whole process. Throws std::invalid_argument when the processor lacks it.
void set_instruction_set(const std::string& name);

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
