// Arrays on a GPU whose call moves host memory: what the call reads is copied to the host, what it writes is copied
// back.
//
//     caller's stream     kernels (ready)                                         kernels
//     stream in                      copies what is read (copied)                /  wait for (back)
//     the call                                             moves host memory    /
//     stream out                                                  copies what is written (back)
//
// The ranks match calls by their order: a call keeps its place, and is not begun before its inputs have been copied.
// The host memory is the process's own, which the other ranks of the host can read, and is registered with the GPU
// (pinned), so that copies run beside the program.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/gpu.hpp"

namespace procgroup {

class StagingMemory;

// How much host memory the calls of a GPU have, and have had and keep for later ones.
size_t staged_bytes(Gpu& gpu);

class StagedTask final : public DeviceTask {
 public:
  // Queue the copies of `inputs`, behind what is queued on the streams of the arrays, which `owner` keeps alive. Throws
  // std::runtime_error for an error of the driver.
  StagedTask(Gpu& gpu, const std::vector<CudaStream>& streams, std::vector<DeviceSpan> inputs,
             std::vector<DeviceSpan> outputs, std::shared_ptr<const void> owner);
  StagedTask(const StagedTask&) = delete;
  StagedTask& operator=(const StagedTask&) = delete;
  ~StagedTask() override;

  // The host memory of each input and output.
  const std::vector<void*>& inputs() const { return inputs_; }
  const std::vector<void*>& outputs() const { return outputs_; }
  // Let another task move that memory; otherwise the engine does. It may own this task, for as long as it is pending.
  void let_move(std::shared_ptr<Task> inner) { inner_ = std::move(inner); }
  // Call it before what the call has written is copied back.
  void before_copying_back(std::function<void()> finish) { finish_ = std::move(finish); }

  bool ready() override;
  void start(int root, uint64_t number) override;
  State test(std::vector<int>& awaited) override;
  void cancel() override;
  int64_t longest_sleep_ns() const override { return inner_ ? inner_->longest_sleep_ns() : kTaskSleepNs; }
  void let_wait(const std::vector<CudaStream>& streams) override;

 private:
  struct Written {
    DeviceSpan span;
    void* host;
  };

  void copy_back();

  Gpu& gpu_;
  StagingMemory& memory_;
  std::shared_ptr<const void> owner_;
  std::shared_ptr<Task> inner_;
  std::function<void()> finish_;
  std::vector<void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<Written> written_;
  std::vector<CudaEvent> ready_;
  void* block_ = nullptr;
  size_t block_bytes_ = 0;
  CudaEvent copied_ = nullptr;
  std::atomic<CudaEvent> back_{nullptr};
  State inner_state_ = State::kCompleted;
};

}  // namespace procgroup
