#include "nccl/nccl_memory.hpp"

#include <stdexcept>
#include <utility>

#include "base/file_descriptor.hpp"
#include "base/native_thread.hpp"

namespace procgroup {
namespace {

constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC

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
    communicator_->keep(memory_);  // also where an abort ends the registration
    void* const memory = reinterpret_cast<void*>(memory_->address());
    if (nccl.ncclCommWindowRegister != nullptr && backend_->size() > 1)
      communicator_->call(false, [&](NcclHandle handle) {
        return nccl.ncclCommWindowRegister(handle, memory, memory_->registered_bytes(), &window, kSymmetric);
      });
  } catch (const std::runtime_error& error) {
    error_ = error.what();
  }
  backend_->remove_ungated();
  has_ended_.store(true, std::memory_order_release);
}

}  // namespace procgroup
