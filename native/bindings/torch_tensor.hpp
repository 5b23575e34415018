// torch's own tensors, read without a call into Python: through the C functions that torch offers (DLPack 1.2).
#pragma once

#include <nanobind/nanobind.h>

#include "dtype/dtype.hpp"
#include "dtype/strided.hpp"

namespace procgroup {

// Read a torch.Tensor or torch.nn.Parameter in CPU memory. False for everything else, also for tensors that
// procgroup.arrays.view must judge: of other devices, layouts and dtypes, with lazy conjugation or negation.
bool read_torch_tensor(nanobind::handle array, Strided& place, Dtype& dtype);

}  // namespace procgroup
