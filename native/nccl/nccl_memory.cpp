#include "nccl/nccl_memory.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "base/file_descriptor.hpp"
#include "base/native_thread.hpp"

namespace procgroup {
namespace {

constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC

struct Lent {
  std::mutex mutex;  // guards what follows
  std::shared_ptr<const NcclLibrary> library;
  uint64_t allocated = 0;
  std::map<CudaAddress, std::pair<uint64_t, std::shared_ptr<NcclMemory>>> memories;  // with their numbers
};
Lent& lent() {
  static auto* const lent = new Lent;  // never destroyed: other libraries free memory while the process ends
  return *lent;
}

}  // namespace

NcclMemory::NcclMemory(std::shared_ptr<const NcclLibrary> library, Gpu& gpu, size_t bytes)
    : library_(std::move(library)), gpu_(gpu), bytes_(bytes), generation_(fork_generation()) {
  const OnGpu on_gpu(gpu_);
  library_->require(library_->ncclMemAlloc(&memory_, registered_bytes()));
}

// Kernels of the program may still use it, and a thread that waits for them must not hold the language's lock.
NcclMemory::~NcclMemory() {
  if (fork_generation() != generation_) return;
  start_native_thread("pg-nccl-free", [library = library_, &gpu = gpu_, memory = memory_] {
    try {
      const OnGpu on_gpu(gpu);
      gpu.synchronize();
      library->ncclMemFree(memory);
    } catch (const std::runtime_error&) {  // of a GPU that can do nothing any more
    }
  }).detach();
}

void lend_memory_of(std::shared_ptr<const NcclLibrary> library) {
  const std::lock_guard lock(lent().mutex);
  lent().library = std::move(library);
}

void* allocate_lent(size_t bytes, int device) try {
  const std::lock_guard lock(lent().mutex);
  if (lent().library == nullptr) return nullptr;
  const auto memory = std::make_shared<NcclMemory>(lent().library, Gpu::get(device), bytes);
  lent().memories[memory->address()] = {lent().allocated++, memory};
  return reinterpret_cast<void*>(memory->address());
} catch (const std::exception&) {
  return nullptr;
}

void free_lent(void* memory) {
  const std::lock_guard lock(lent().mutex);
  lent().memories.erase(reinterpret_cast<CudaAddress>(memory));
}

std::vector<std::shared_ptr<NcclMemory>> lent_at(const std::vector<CudaAddress>& addresses) {
  const std::lock_guard lock(lent().mutex);
  std::map<uint64_t, std::shared_ptr<NcclMemory>> in_order;
  for (const CudaAddress address : addresses) {
    const auto found = lent().memories.find(address);
    if (found == lent().memories.end())
      throw std::invalid_argument(
          "it has memory that NCCL has not allocated. Make it with "
          "torch.cuda.MemPool(group.mem_allocator)");
    in_order.insert(found->second);
  }
  std::vector<std::shared_ptr<NcclMemory>> memories;
  for (const auto& [number, memory] : in_order) memories.push_back(memory);
  return memories;
}

Task::State NcclRegistration::test(std::vector<int>& awaited) {
  awaited.clear();
  if (has_ended_.load(std::memory_order_acquire)) {
    if (!error_.empty()) throw std::runtime_error(error_);
    return State::kCompleted;
  }
  if (communicator_ != nullptr) return State::kPending;
  communicator_ = backend_->communicator_for(NcclBackend::kAll, 0);
  if (communicator_ != nullptr) communicator_->post([self = shared_from_this()] { self->run(); });
  return State::kPending;
}

// In the communicator's thread, because it waits for the other ranks. The handle of the window is not needed. NCCL
// before 2.27 has no windows, and its later versions make none where the GPUs cannot reach each other's memory.
void NcclRegistration::run() {
  try {
    const NcclLibrary& nccl = *backend_->library();
    const OnGpu on_gpu(backend_->gpu());
    void* window = nullptr;
    for (const std::shared_ptr<NcclMemory>& one : memories_) {
      communicator_->keep(one);  // also where an abort ends the registration
      void* const memory = reinterpret_cast<void*>(one->address());
      if (nccl.ncclCommWindowRegister != nullptr && backend_->size() > 1)
        communicator_->call(false, [&](NcclHandle handle) {
          return nccl.ncclCommWindowRegister(handle, memory, one->registered_bytes(), &window, kSymmetric);
        });
    }
  } catch (const std::runtime_error& error) {
    error_ = error.what();
  }
  memories_.clear();
  backend_->remove_ungated();
  has_ended_.store(true, std::memory_order_release);
}

}  // namespace procgroup
