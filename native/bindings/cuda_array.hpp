// Arrays that describe themselves by the CUDA array interface, as CuPy's and Numba's do, read without a call into
// Python of ours (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3).
#pragma once

#include <nanobind/nanobind.h>

#include "cuda/cuda_driver.hpp"
#include "dtype/dtype.hpp"

namespace procgroup {

struct CudaArray {
  CudaAddress address = 0;
  size_t count = 0;
  size_t rows = 1;
  Dtype dtype = Dtype::kUint8;
  int device = 0;
  CudaStream stream = nullptr;  // as read_cuda_stream gives it
};

// Read a contiguous array in which this call may write, if it writes. False for everything else, also for arrays that
// procgroup.arrays.view must judge: with a mask, without elements, of a dtype that the interface does not name.
bool read_cuda_array(nanobind::handle array, bool is_written, CudaArray& read);

// The stream on which the array is used now; null where the library states none. False for what has no interface.
bool read_cuda_stream(nanobind::handle array, CudaStream& stream);

}  // namespace procgroup
