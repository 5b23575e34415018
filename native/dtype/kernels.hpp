// The table of element kernels that each instruction set provides.
#pragma once

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

// Combines `count` elements of at least two sources; the rules are those of reduce().
using Kernel = void (*)(void* out, const void* const* sources, int source_count, size_t count);

struct KernelTable {
  Kernel kernels[kDtypes][kReduceOps];  // null where supports() is false
};

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
