// Memory of a GPU that NCCL allocates, in a *window*: the ranks of a communicator register memories of one size
// together, and NCCL's kernels then read and write those of all ranks in place
// (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html).
//
// A window ends with its communicator. The memory is freed when that has ended and no array is left.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "nccl/nccl_backend.hpp"

namespace procgroup {

class NcclMemory {
 public:
  // Throws std::runtime_error for an error of NCCL.
  NcclMemory(std::shared_ptr<const NcclLibrary> library, Gpu& gpu, size_t bytes);
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;
  ~NcclMemory();

  CudaAddress address() const { return reinterpret_cast<CudaAddress>(memory_); }
  size_t bytes() const { return bytes_; }
  int device() const { return gpu_.number(); }
  size_t registered_bytes() const { return (bytes_ + kUnit - 1) / kUnit * kUnit; }

 private:
  static constexpr size_t kUnit = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT

  const std::shared_ptr<const NcclLibrary> library_;
  Gpu& gpu_;
  const size_t bytes_;
  const uint64_t generation_;
  void* memory_ = nullptr;
};

// Memory that is lent to the allocator of another library, as torch.cuda.MemPool: found by its address until it is
// freed. From any thread.
//
// From now on memory comes from this library.
void lend_memory_of(std::shared_ptr<const NcclLibrary> library);
// Return null before that, and where the GPU has no memory left.
void* allocate_lent(size_t bytes, int device);
void free_lent(void* memory);
// Return the memories at these addresses in the order of their allocation, which is the same on all ranks. Throws
// std::invalid_argument for an address at which no such memory begins.
std::vector<std::shared_ptr<NcclMemory>> lent_at(const std::vector<CudaAddress>& addresses);

// Registers memories, of the same sizes on all ranks, in windows of the communicator of collectives.
class NcclRegistration final : public Task, public std::enable_shared_from_this<NcclRegistration> {
 public:
  NcclRegistration(std::shared_ptr<NcclBackend> backend, std::vector<std::shared_ptr<NcclMemory>> memories)
      : backend_(std::move(backend)), memories_(std::move(memories)) {}

  void start(int /*root*/, uint64_t /*number*/) override {}
  State test(std::vector<int>& awaited) override;

 private:
  void run();

  const std::shared_ptr<NcclBackend> backend_;
  std::vector<std::shared_ptr<NcclMemory>> memories_;  // until the communicator keeps them
  std::shared_ptr<NcclCommunicator> communicator_;     // once the communicator's thread is to register the memories
  std::atomic<bool> has_ended_{false};
  std::string error_;  // then
};

}  // namespace procgroup
