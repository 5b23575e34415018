// The device "cuda" for a PyTorch that was built without CUDA, on the stand-in GPUs of tests/nccl/cuda_device.hpp.
//
// Vocabulary: a *stream id* is the driver's handle of a stream, 0 for the legacy default stream. A tensor's memory is
// the driver's, which no host reads: a missing copy crashes. Kernels are those of CPUs. An operation waits until the
// current stream is idle, copies its tensors to the host, runs there, and copies what it changed back:
//
//      add_(tensor)    synchronize the current stream | copy in | CPU kernel | copy out
//
// So an operation comes after what is queued on the current stream, and not after what is queued on others: a wait for
// an event that is missing shows as wrong numbers. Copies and fills of contiguous memory are queued and not awaited, as
// on a GPU. Memory is freed in the order of the stream on which it was allocated, as the caching allocator reuses it; an
// operation of another stream that comes later is a fault ("illegal address").
//
// Operations on a stream that is in a capture are those of torch_graphs.hpp.
//
// torch finds this by its registries: of guards, hooks, allocators and kernels of the dispatch key CUDA.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch_driver.hpp"
#include "torch_graphs.hpp"

namespace {

using namespace stand_in_torch;

constexpr unsigned kNonBlocking = 1;
constexpr int kMemoryType = 2, kHostMemory = 1;  // of cuPointerGetAttribute

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

// --- memory ---

struct Block {
  c10::DeviceIndex device;
  int64_t stream;
  std::set<int64_t> used_on;   // other streams, of record_stream
  std::shared_ptr<Pool> pool;  // of the graph in whose capture it was allocated
};
std::mutex blocks_mutex;
std::unordered_map<uintptr_t, Block>& blocks() {
  static auto* const all = new std::unordered_map<uintptr_t, Block>;
  return *all;
}

void let_wait(Handle stream, Handle before) {
  Handle event = nullptr;
  CHECKED(cuEventCreate(&event, 0));
  CHECKED(cuEventRecord(event, before));
  CHECKED(cuStreamWaitEvent(stream, event, 0));
  CHECKED(cuEventDestroy(event));
}

void free_block(void* data);
void free_later(void* data, const Block& block) {
  {
    const std::lock_guard lock(blocks_mutex);
    blocks()[reinterpret_cast<uintptr_t>(data)] = block;
  }
  free_block(data);
}

void free_block(void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Block block;
  {
    const std::lock_guard lock(blocks_mutex);
    const auto found = blocks().find(address);
    block = found->second;
    blocks().erase(found);
  }
  if (block.pool != nullptr) {
    const std::lock_guard lock(block.pool->mutex);
    block.pool->dropped.push_back(address);
    return;
  }
  const On on(block.device);
  std::set<int64_t> streams = block.used_on;
  streams.insert(block.stream);
  for (const int64_t stream : streams) {
    const auto capture = capture_of(handle_of(stream));
    if (capture == nullptr) continue;
    const std::lock_guard lock(capture->pool->mutex);
    capture->afterwards.push_back([data, block] { return free_later(data, block); });
    return;
  }
  for (const int64_t other : block.used_on) let_wait(handle_of(block.stream), handle_of(other));
  cuMemFreeAsync(address, handle_of(block.stream));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, current_device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    make_current(current_device);
    uintptr_t address = 0;
    {
      const BesideCaptures beside;
      CHECKED(cuMemAlloc(&address, bytes));
    }
    const auto capture = capture_of(current_stream());
    const auto pool = capture == nullptr ? nullptr : capture->pool;
    if (pool != nullptr) {
      const std::lock_guard lock(pool->mutex);
      pool->memory.insert(address);
    }
    const std::lock_guard lock(blocks_mutex);
    blocks()[address] = {current_device, current_streams[current_device], {}, pool};
    return {reinterpret_cast<void*>(address), reinterpret_cast<void*>(address), &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    CHECKED(cuMemcpyAsync(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, current_stream()));
  }
};

struct PinnedAllocator final : c10::Allocator {
  static void free(void* data) {
    const BesideCaptures beside;
    cuMemFreeHost(reinterpret_cast<uintptr_t>(data));
  }
  c10::DataPtr allocate(size_t bytes) override {
    make_current(current_device);
    const BesideCaptures beside;
    uintptr_t address = 0;
    if (bytes != 0) CHECKED(cuMemAllocHost(&address, bytes));
    auto* const data = reinterpret_cast<void*>(address);
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

// --- streams, events and devices ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    if (device != before) make_current(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override { make_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { make_current(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index() < 0 ? current_device : device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const On on(device.index() < 0 ? current_device : device.index());
    Handle stream = nullptr;
    CHECKED(cuStreamCreateWithPriority(&stream, kNonBlocking, priority));
    return stream_of(current_device, reinterpret_cast<int64_t>(stream));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return getNewStream(device, is_high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::DeviceIndex index = stream.device_index();
    const int64_t before = std::exchange(current_streams[index], stream.id());
    return stream_of(index, before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    const On on(stream.device_index());
    return cuStreamQuery(handle_of(stream.id())) == kSuccess;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const On on(stream.device_index());
    CHECKED(cuStreamSynchronize(handle_of(stream.id())));
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const On on(stream.device_index());
    int status = 0;
    CHECKED(cuStreamIsCapturing(handle_of(stream.id()), &status));
    return status != 0;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const On on(device);
    CHECKED(cuCtxSynchronize());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const On on(stream.device_index());
    if (*event == nullptr) CHECKED(cuEventCreate(event, 0));
    CHECKED(cuEventRecord(*event, handle_of(stream.id())));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const On on(stream.device_index());
    CHECKED(cuStreamWaitEvent(handle_of(stream.id()), event, 0));
  }
  bool queryEvent(void* event) const override {
    make_current(current_device);
    if (event == nullptr) return true;
    const int result = cuEventQuery(event);
    if (result >= kCaptureUnsupported) check(result, "cuEventQuery");
    return result != kNotReady;
  }
  void synchronizeEvent(void* event) const override {
    make_current(current_device);
    if (event != nullptr) CHECKED(cuEventSynchronize(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cuEventDestroy(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    float milliseconds = 0;
    CHECKED(cuEventElapsedTime(&milliseconds, begin, end));
    return milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard lock(blocks_mutex);
    const auto found = blocks().find(reinterpret_cast<uintptr_t>(data.get_context()));
    if (found != blocks().end() && found->second.stream != stream.id()) found->second.used_on.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct StandInHooks : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }  // without a look at the driver: torch asks while it is imported
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return has_context; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return stand_in_torch::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return stand_in_torch::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { make_current(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = stand_in_torch::current_device;
    if (device >= 0) make_current(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    unsigned type = 0;
    return cuPointerGetAttribute(&type, kMemoryType, reinterpret_cast<uintptr_t>(data)) == kSuccess &&
           type == kHostMemory;
  }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, stand_in_torch::current_device}; }
};

// --- operations ---

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

void queue_copy(const at::Tensor& to, const at::Tensor& from, Handle stream) {
  if (to.nbytes() == 0) return;
  CHECKED(cuMemcpyAsync(reinterpret_cast<uintptr_t>(to.data_ptr()), reinterpret_cast<uintptr_t>(from.data_ptr()),
                        to.nbytes(), stream));
}

bool is_one_block(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
         to.is_non_overlapping_and_dense() && to.is_neg() == from.is_neg() && to.is_conj() == from.is_conj();
}

// All bytes of a tensor's storage, on the host, with the tensor's view of them.
at::Tensor to_host(const at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  const auto bytes = tensor.storage().nbytes();
  const at::Tensor host = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  const Handle stream = current_stream();
  if (bytes != 0)
    CHECKED(cuMemcpyAsync(reinterpret_cast<uintptr_t>(host.data_ptr()),
                          reinterpret_cast<uintptr_t>(tensor.storage().data()), bytes, stream));
  CHECKED(cuStreamSynchronize(stream));
  at::Tensor view = at::empty({0}, tensor.options().device(at::kCPU));
  view.set_(host.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  view._set_neg(tensor.is_neg());
  view._set_conj(tensor.is_conj());
  return view;
}

// Of what `to_host` gave, everything back.
void to_device(const at::Tensor& tensor, const at::Tensor& host) {
  const c10::DeviceGuard guard(tensor.device());
  const Handle stream = current_stream();
  if (tensor.storage().nbytes() != 0)
    CHECKED(cuMemcpyAsync(reinterpret_cast<uintptr_t>(tensor.storage().data()),
                          reinterpret_cast<uintptr_t>(host.storage().data()), tensor.storage().nbytes(), stream));
  CHECKED(cuStreamSynchronize(stream));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  const at::Tensor source = from.expand_as(to);
  const at::Device device = to.is_cuda() ? to.device() : from.device();
  const c10::DeviceGuard guard(device);
  const Handle stream = current_stream();
  const bool is_on_gpus = to.is_cuda() && source.is_cuda();
  if (const auto capture = capture_of(stream); capture != nullptr && is_on_gpus && to.device() == source.device()) {
    capture_copy(to, source, *capture, stream);
    return to;
  }
  if (is_one_block(to, source)) {
    const bool is_on_two = is_on_gpus && source.device() != to.device();
    if (is_on_two) CHECKED(cuStreamSynchronize(handle_of(current_streams[source.device().index()])));
    queue_copy(to, source, stream);
    if (is_on_two) CHECKED(cuStreamSynchronize(stream));  // the source may be freed, in the order of its own stream
    const at::Tensor& host = to.is_cuda() ? source : to;
    if (!is_on_gpus && !(non_blocking && host.is_pinned())) CHECKED(cuStreamSynchronize(stream));
    return to;
  }
  const at::Tensor host = source.is_cuda() ? to_host(source) : source;
  if (!to.is_cuda()) {
    to.copy_(host);
    return to;
  }
  at::Tensor target = to_host(to);
  target.copy_(host);
  to_device(to, target);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  copy_(target, from, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->generic_set_sizes_contiguous(size);
  const auto needed = static_cast<size_t>(tensor->storage_offset() + tensor->numel()) * self.element_size();
  c10::StorageImpl* const storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    c10::DataPtr grown = device_allocator.allocate(needed);
    if (storage->nbytes() != 0) device_allocator.copy_data(grown.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(grown));
    storage->set_nbytes(needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(at::empty({0}, self.options()).storage());
  self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return at::_local_scalar_dense(to_host(self)); }

bool is_pinned(const at::Tensor& self, std::optional<at::Device>) {
  return !self.is_cuda() && at::detail::getCUDAHooks().isPinnedPtr(self.storage().data());
}

at::Tensor pin_memory(const at::Tensor& self, std::optional<at::Device>) {
  const auto bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       pinned_allocator.allocate(bytes), &pinned_allocator, false);
  at::Tensor made = at::empty({0}, self.options());
  made.set_(at::Storage(storage), 0, self.sizes(), self.strides());
  return made.copy_(self);
}

void record_stream(at::Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// Its schema does not say that it writes the running statistics, so it cannot be left to the host as it is.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool is_training, double momentum,
    double epsilon) {
  const auto host_of = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional(to_host(*tensor)) : std::nullopt;
  };
  const std::optional<at::Tensor> host_mean = host_of(mean), host_variance = host_of(variance);
  const auto [output, saved_mean, saved_deviation] =
      at::native_batch_norm(to_host(input), host_of(weight), host_of(bias), host_mean, host_variance, is_training,
                            momentum, epsilon);
  if (is_training && host_mean) to_device(*mean, *host_mean);
  if (is_training && host_variance) to_device(*variance, *host_variance);
  const at::Device device = input.device();
  return {output.to(device), saved_mean.to(device), saved_deviation.to(device)};
}

// The device of an operation's first tensor on a GPU, or the one that it is given; else the current one.
c10::Device device_of_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (argument.isDevice()) return argument.toDevice();
    for (const at::Tensor& tensor : tensors_of(argument))
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  }
  return {c10::kCUDA, current_device};
}

void run_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::DeviceGuard guard(device_of_call(op, *stack));
  if (const auto found = capture_of(current_stream()); found != nullptr)
    return capture(op, stack, *found, current_stream(), {3, 4});  // the running statistics
  const std::vector<c10::IValue> given = torch::jit::last(*stack, 8).vec();
  torch::jit::drop(*stack, given.size());
  const auto tensor = [&](size_t index) { return given[index].toOptional<at::Tensor>(); };
  auto [output, saved_mean, saved_deviation] =
      batch_norm(given[0].toTensor(), tensor(1), tensor(2), tensor(3), tensor(4), given[5].toBool(),
                        given[6].toDouble(), given[7].toDouble());
  torch::jit::push(*stack, std::move(output), std::move(saved_mean), std::move(saved_deviation));
}

void set_bytes(const at::Tensor& tensor, int64_t bytes) {
  const c10::DeviceGuard guard(tensor.device());
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = device_allocator.allocate(static_cast<size_t>(bytes));
  if (const size_t kept = std::min(storage->nbytes(), static_cast<size_t>(bytes)); kept != 0)
    device_allocator.copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

// Of all other operations.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (capture_count == 0) return at::native::cpu_fallback(op, stack);
  const c10::DeviceGuard guard(device_of_call(op, *stack));
  if (const auto found = capture_of(current_stream()); found != nullptr)
    return capture(op, stack, *found, current_stream());
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("is_pinned", &is_pinned);
  library.impl("_pin_memory", &pin_memory);
  library.impl("record_stream", &record_stream);
  library.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&run_batch_norm>());
}

// Sets the size in bytes of a tensor's storage: that of torch's storages themselves is only in builds with CUDA.
TORCH_LIBRARY(stand_in, library) {
  library.def("set_bytes(Tensor self, int bytes) -> ()", &set_bytes);
  library.def("begin_capture(int mode) -> int", &begin_capture);
  library.def("end_capture(int graph) -> ()", &end_capture);
  library.def("replay(int graph) -> ()", &replay);
  library.def("reset(int graph) -> ()", &reset);
}

at::Tensor copy_from_sparse(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor target = to;
  at::copy_sparse_to_sparse_(target, from);
  return target;
}

// Sparse tensors are made of others; all that computes with them runs on the host, too.
void run_sparse_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (capture_of(current_stream()) != nullptr) CHECKED(cuStreamSynchronize(current_stream()));  // torch counts the rows
  at::native::cpu_fallback(op, stack, false, c10::DispatchKey::SparseCPU);
}

TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse_on_host>());
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("empty.memory_format", &at::native::empty_sparse_symint);
  library.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  library.impl("indices", &at::native::indices_sparse);
  library.impl("values", &at::native::values_sparse);
  library.impl("_nnz", &at::native::_nnz_sparse);
  library.impl("sparse_dim", &at::native::sparse_dim_sparse);
  library.impl("dense_dim", &at::native::dense_dim_sparse);
  library.impl("is_coalesced", &at::native::is_coalesced_sparse);
  library.impl("_coalesced_", &at::native::_coalesced_sparse_);
  library.impl("copy_", &at::native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  library.impl("_copy_from_and_resize", &copy_from_sparse);
  library.impl("sparse_resize_", &at::native::sparse_resize_);
  library.impl("sparse_resize_and_clear_", &at::native::sparse_resize_and_clear_);
  library.impl("clone", &at::native::clone_sparse);
  library.impl("record_stream", +[](at::Tensor&, c10::Stream) {});
}

}  // namespace

namespace c10d {
// Of stock DDP, which measures a device's steps: here by the host's clock.
struct StandInTimer final : Timer {
  explicit StandInTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event begin, Event end) override {
    const std::optional<int64_t> from = getTimestamp(begin), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, StandInTimer)
}  // namespace c10d

namespace at {
// Found by this name.
struct CUDAHooks final : StandInHooks {
  explicit CUDAHooks(CUDAHooksArgs) {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
