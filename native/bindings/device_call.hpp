// Calls on arrays on GPUs: on which streams the arrays are used, and what moves them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "array_view.hpp"
#include "cuda/staging.hpp"
#include "nccl/nccl_memory.hpp"
#include "nccl/nccl_task.hpp"
#include "python_task.hpp"

namespace procgroup {

// The streams on which the libraries of these arrays use them now. A library may state none: then it uses the array
// after the host has waited for the GPU.
struct ArrayStreams {
  std::vector<CudaStream> streams;
  bool has_unordered = false;

  void add(CudaStream stream);  // null where the library states none
};
CudaStream current_stream(const ArrayView& array);
ArrayStreams current_streams(const std::vector<ArrayView>& arrays);

// Whether one of the streams is in a capture. Raises DistBackendError for an error of the driver.
bool are_capturing(const ArrayStreams& used, int device);

// Let a call move host memory, to and from which the elements are copied: its request gets the addresses there. Raises
// DistBackendError for an error of the driver.
std::shared_ptr<StagedTask> stage(Request& request, std::shared_ptr<const KeptMemory> memory, const ArrayStreams& used,
                                  int rank);
// Wait until what a send reads has been copied. Raises DistBackendError after so many seconds, and for an error of the
// driver.
void wait_until_copied(StagedTask& staged, int device, double seconds);
// Raises DistBackendError for an error of NCCL, as where the GPU has no memory left.
std::shared_ptr<NcclMemory> allocate_by_nccl(NcclBackend& backend, size_t bytes);
// Let NCCL move the elements. Raises ArgumentError for arrays on another GPU than earlier ones.
std::shared_ptr<NcclTask> move_by_nccl(const std::shared_ptr<NcclBackend>& backend, const Request& request,
                                       std::shared_ptr<const KeptMemory> memory, std::vector<CudaStream> streams,
                                       bool stays);

}  // namespace procgroup
