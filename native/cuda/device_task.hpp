// A task whose work is queued on a GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/cuda_driver.hpp"
#include "ops/task.hpp"

namespace procgroup {

// The memory of an array on a GPU, or of a block of one.
struct DeviceSpan {
  CudaAddress address = 0;
  size_t bytes = 0;

  bool operator==(const DeviceSpan&) const = default;
};

class DeviceTask : public Task {
 public:
  // Let what is queued on these streams from now on come after the task. Once it is queued; from any thread.
  virtual void let_wait(const std::vector<CudaStream>& streams) = 0;
  // The stream on which the whole task is queued; null before that, and where it is on several.
  virtual CudaStream queued_on() const { return nullptr; }
};

}  // namespace procgroup
