// Compiled calls on arrays on a GPU. Its functions are called in any of XLA's threads, which may have chosen another
// GPU.
//
//     XLA's stream     kernels (pack)    wait for (gate n)   NCCL   (unpack)    kernels
//     XLA's thread     call n: issue it, as a blocking call outside of a compiled function
//
// NCCL makes a call on XLA's stream, behind its gate: see nccl/nccl_backend.hpp. XLA does not keep its memory for a
// call that has failed. Behind a gate all work on it is in XLA's stream, and so before whatever uses the memory next.
// A call without a gate has memory of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "cuda/staging.hpp"
#include "nccl/nccl_task.hpp"
#include "xla/functional_call.hpp"

namespace procgroup {

// Where XLA makes a call, and what may move its elements there.
struct XlaGpu {
  // Throws std::runtime_error for a stream that is in a capture, and for an error of the driver.
  XlaGpu(CudaStream its_stream, std::shared_ptr<NcclBackend> backend);

  Gpu& gpu;
  const CudaStream stream;
  const std::shared_ptr<NcclBackend> nccl;  // loaded; null where the group has none
};

// NCCL moves the elements.
class GpuDevice final : public CallDevice {
 public:
  // Throws std::invalid_argument for another GPU than the group's.
  GpuDevice(Group& group, double seconds, LanguageRuntime& language, const XlaGpu& gpu, OpKind op);

  bool needs_scratch() const override { return !has_gate_; }
  std::shared_ptr<std::byte[]> allocate(size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) const override;
  void clear(void* at, size_t bytes) const override;
  void run(Request request) override;
  void exchange(MessageRequest sent, MessageRequest received) override;

 private:
  std::shared_ptr<NcclTask> task_for(NcclCall call) const;
  std::shared_ptr<GroupOperation> start(MessageRequest& request) const;

  const std::shared_ptr<NcclBackend> nccl_;
  Gpu& gpu_;
  const CudaStream stream_;
  const OnGpu on_gpu_;
  std::unique_lock<std::mutex> issuing_;  // from the choice of a gate until the call has its place in the stream
  bool has_gate_ = false;
  std::vector<std::shared_ptr<std::byte[]>> allocated_;
};

// Wait until the inputs of a call, or of another `what`, have been copied to host memory. Throws std::runtime_error
// after that many seconds, and OperationFailed where a signal's handler ends the wait.
void wait_until_copied(StagedTask& staged, int device, const char* what, double seconds, LanguageRuntime& language);
// Run a call on copies of its arrays in host memory, and queue that its results are copied back. Throws
// as wait_until_copied.
void run_on_copies(const XlaGpu& gpu, const FlatArrays& given, const FlatArrays& results, double seconds,
                   LanguageRuntime& language, const std::function<void(const FlatArrays&, const FlatArrays&)>& run);

}  // namespace procgroup
