// torch's own tensors, read without a call into Python: through the C functions that torch offers (DLPack 1.2).
#pragma once

#include <nanobind/nanobind.h>

#include "cuda/cuda_driver.hpp"
#include "dtype/dtype.hpp"
#include "dtype/strided.hpp"

namespace procgroup {

// In place of the number of a CUDA device; as in procgroup.arrays.array_view.
inline constexpr int kHostMemory = -1;

// Read a torch.Tensor or torch.nn.Parameter in host memory or on a CUDA device. False for everything else, also for
// tensors that procgroup.arrays.view must judge: of other devices, layouts and dtypes, with lazy conjugation or
// negation.
bool read_torch_tensor(nanobind::handle array, Strided& place, Dtype& dtype, int& device);

// The current stream of torch on a CUDA device, on which it uses this tensor. False for everything else.
bool read_torch_stream(nanobind::handle tensor, int device, CudaStream& stream);

}  // namespace procgroup
