// A call that XLA has compiled as part of a function, on the buffers that XLA gives it.
//
// Arrays of one dtype go through one call, so that ranks inside and outside of a compiled function make the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi.hpp"
#include "xla/gpu_device.hpp"

namespace procgroup {

// Read the buffers of a call but for tokens, which order calls and have no memory. Throws std::invalid_argument for
// what is not a buffer of a dtype that can be sent.
FlatArrays arrays_of(const xla::Buffers& buffers);
// Return the attribute `name`, a scalar of uint64. Throws std::invalid_argument where there is none.
uint64_t attribute_of(const xla::Attributes& attributes, const char* name);
// Read the stream of a call on a GPU; return XLA's error where it gives none.
xla::Error* read_stream(const xla::CallFrame& frame, CudaStream& stream);
xla::Error* make_error(const xla::Api& api, const std::string& text);
// Return why the frame cannot be read: it is of another version. Empty where it can be.
std::string misfit_of(const xla::CallFrame& frame);
// Answer a call that asks for the handler's version; return false for other calls.
bool answer_metadata(const xla::CallFrame& frame);

class CompiledCall {
 public:
  CompiledCall(FunctionalCall call, const std::vector<Dtype>& dtypes);

  // Whether NCCL makes calls of it on a GPU.
  bool uses(const NcclBackend& nccl) const;

  // Blocking, for at most that many seconds per dtype. On a GPU a call may be queued and go on: its failure is that of
  // the group's next call. Calls that NCCL does not have go through host memory. Throws
  // OperationFailed, std::invalid_argument for other arrays than those that were compiled and for another GPU than the
  // group's, and std::runtime_error for an error of the GPU.
  void run(Group& group, const FlatArrays& given, const FlatArrays& results, double seconds, LanguageRuntime& language,
           const XlaGpu* gpu = nullptr) const;

 private:
  void require_compiled(const FlatArrays& arrays) const;
  bool goes_by_nccl(const NcclBackend& nccl, Dtype dtype) const;

  FunctionalCall call_;
  std::vector<Dtype> dtypes_;
  std::vector<std::vector<size_t>> bundles_;  // the indices of the arrays of one dtype, by its name
};

}  // namespace procgroup
