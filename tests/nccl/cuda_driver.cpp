// A stand-in libcuda.so.1: the part of CUDA's driver API that cuda.core uses for devices, memory, streams and events.
//
// cuda.core and cuda.bindings know one symbol, cuGetProcAddress_v2, and ask it for every function by its name without
// a suffix: hence the functions have those names, with the newest signature. A function that is missing here raises
// "function ... is not found" in Python when it is called. Kernels and IPC are missing, and of
// graphs all but capture, launch and what is kept with them.
//
// Copies are as asynchronous as CUDA documents: from pageable memory the bytes are taken at the call, to pageable
// memory the call waits for the copy, and between device and pinned memory all happens when the stream gets there.
// Device memory that is freed before the stream gets there is a fault.
//
// With PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS=1 cuStreamWaitValue32 and cuStreamWriteValue32 are there, and
// return CUDA_ERROR_NOT_SUPPORTED, as on GPUs and drivers without them.
//
// With PROCGROUP_STAND_IN_FREES_BLOCK=1 threads that ask a stream or an event for its state wait while another one frees
// memory, which waits for the work on the GPU: as behind cudaFree.
#include <dlfcn.h>

#include <cstdio>
#include <shared_mutex>

#include "cuda_device.hpp"

#define CUDA_API extern "C" __attribute__((visibility("default")))

namespace stand_in {
namespace {

using Handle = void*;

// Contexts and memory pools are numbers: each device has one of both, and the host has a pool.
constexpr uintptr_t kContexts = 0x1000;
constexpr uintptr_t kPools = 0x2000;
constexpr uintptr_t kHostPool = 0x3000;

thread_local std::vector<int> current_contexts;  // each thread's stack, of the devices of its contexts
thread_local int capture_mode = kGlobal;

int current_device() { return current_contexts.empty() ? -1 : current_contexts.back(); }
int device_of(Handle context) { return static_cast<int>(uintptr_t(context) - kContexts); }
bool has_memory_operations() {
  static const bool has = number_from_environment("PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS", 0) == 0;
  return has;
}

std::shared_mutex frees;
bool frees_block() {
  static const bool block = number_from_environment("PROCGROUP_STAND_IN_FREES_BLOCK", 0) != 0;
  return block;
}
void await_frees() {
  if (frees_block()) const std::shared_lock lock(frees);
}

Devices& devices() { return Devices::get(); }
bool is_device(int device) { return device >= 0 && device < devices().count; }
Handle handle_of(uintptr_t number) { return reinterpret_cast<Handle>(number); }
Handle context_of(int device) { return device < 0 ? nullptr : handle_of(kContexts + device); }
Result fault_or(Result result) { return devices().has_fault ? kIllegalAddress : result; }

template <class T>
Result give(T* output, T value) {
  *output = value;
  return kSuccess;
}

template <class Action>
Result with_stream(Handle handle, Action action) {
  auto stream = devices().stream(handle, current_device());
  return stream == nullptr ? kInvalidHandle : action(stream);
}

Result submit(Handle handle, std::function<void()> work, Position* position = nullptr) {
  return with_stream(handle, [&](auto& stream) {
    if (devices().has_fault) return kIllegalAddress;
    auto submitted = devices().enqueue(stream, std::move(work));
    if (position != nullptr) *position = submitted;
    return kSuccess;
  });
}

// Whether this thread may not make a call now that could disturb a capture: see cudaStreamBeginCapture.
bool is_forbidden() { return devices().disturbs_capture(static_cast<CaptureMode>(capture_mode)); }

// What a program gives a graph to keep, and what is called when nothing keeps it any more: by a thread of the driver.
struct UserObject {
  UserObject(void* pointer, void (*end)(void*)) : pointer(pointer), end(end) {}
  UserObject(const UserObject&) = delete;
  ~UserObject() { std::thread(end, pointer).detach(); }
  void* pointer;
  void (*end)(void*);
};
using Graphs = std::shared_ptr<Graph>;  // a handle of a graph, or of what was made of it, is a pointer to one

// Memory as an argument of a copy: in an allocation, or pageable.
struct Place {
  uintptr_t address;
  size_t bytes;
  std::shared_ptr<Allocation> allocation = devices().find(address);

  bool is_valid() const { return address != 0 && (!allocation || allocation->contains(address, bytes)); }
  bool is_pageable() const { return allocation == nullptr; }

  // Where the bytes are when the stream gets there; nothing if they were freed.
  std::byte* now() const {
    if (is_pageable()) return reinterpret_cast<std::byte*>(address);
    return devices().find(address) == allocation ? allocation->at(address) : nullptr;
  }
};

Result copy(uintptr_t to_address, uintptr_t from_address, size_t bytes, Handle stream, bool waits) {
  if (bytes == 0) return kSuccess;
  Place to{to_address, bytes}, from{from_address, bytes};
  if (!to.is_valid() || !from.is_valid()) return kInvalidValue;
  std::vector<std::byte> staged;
  if (from.is_pageable()) staged.assign(from.now(), from.now() + bytes);
  auto work = [to, from, bytes, staged = std::move(staged)] {
    const auto* source = staged.empty() ? from.now() : staged.data();
    auto* destination = to.now();
    const bool is_fault = source == nullptr || destination == nullptr;
    if (is_fault) devices().has_fault = true;
    if (!is_fault) std::memmove(destination, source, bytes);
  };
  Position done;
  if (waits && is_forbidden()) return kCaptureUnsupported;
  const auto result = submit(stream, std::move(work), &done);
  if (result == kSuccess && (waits || to.is_pageable())) devices().wait(done);
  return result;
}

template <class T>
Result fill(uintptr_t address, T element, size_t count, Handle stream) {
  Place to{address, sizeof(T) * count};
  if (count == 0) return kSuccess;
  if (!to.is_valid() || to.is_pageable()) return kInvalidValue;
  return submit(stream, [to, element, count] {
    auto* bytes = to.now();
    if (bytes == nullptr) devices().has_fault = true;
    for (size_t i = 0; bytes != nullptr && i < count; ++i) std::memcpy(bytes + i * sizeof(T), &element, sizeof(T));
  });
}

Result allocate(uintptr_t* address, size_t bytes, int device, bool is_pinned_host) {
  if (device < 0) return kInvalidContext;
  if (bytes == 0) return kInvalidValue;
  if (is_forbidden()) return kCaptureUnsupported;
  return give(address, devices().allocate(bytes, device, is_pinned_host));
}

// Like CUDA's, waits for the device's work, which may use the memory.
Result free_now(uintptr_t address) {
  auto allocation = devices().find(address);
  if (address == 0) return kSuccess;
  if (allocation == nullptr || allocation->address != address) return kInvalidValue;
  if (is_forbidden()) return kCaptureUnsupported;
  devices().synchronize(allocation->device);
  devices().free(address);
  return kSuccess;
}

// The 32 bits of a memory operation on a stream, which must be device memory or pinned.
bool is_word(const Place& place) {
  return place.address % sizeof(uint32_t) == 0 && place.is_valid() && !place.is_pageable();
}

bool is_met(uint32_t value, uint32_t expected, unsigned condition) {
  if (condition == 0) return static_cast<int32_t>(value - expected) >= 0;  // GEQ, which counts round
  if (condition == 1) return value == expected;                            // EQ
  if (condition == 2) return (value & expected) != 0;                      // AND
  return ~(value | expected) != 0;                                         // NOR
}

// Looks often at first, and then rarely: a wait may last, and the cores are few.
void wait_for_value(const Place& place, uint32_t expected, unsigned condition) {
  auto* bytes = place.now();
  if (bytes == nullptr) {
    devices().has_fault = true;
    return;
  }
  const std::atomic_ref<uint32_t> word(*reinterpret_cast<uint32_t*>(bytes));
  for (int looks = 0; !devices().has_fault && !is_met(word.load(std::memory_order_acquire), expected, condition);) {
    if (++looks > 100) std::this_thread::sleep_for(std::chrono::microseconds(30));
  }
}

// An event's handle is a reference that the event's user holds; a recording may hold another.
std::shared_ptr<Event>& event_of(Handle handle) { return *static_cast<std::shared_ptr<Event>*>(handle); }

int attribute_of(int attribute) {
  static const std::map<int, int> kAttributes = {
      {1, 1024},                       // MAX_THREADS_PER_BLOCK
      {10, 32},                        // WARP_SIZE
      {16, 132},                       // MULTIPROCESSOR_COUNT
      {41, 1},                         // UNIFIED_ADDRESSING
      {75, 9},                         // COMPUTE_CAPABILITY_MAJOR
      {115, 1},                        // MEMORY_POOLS_SUPPORTED
      {123, has_memory_operations()},  // CAN_USE_STREAM_WAIT_VALUE_NOR
      {144, 1},                        // HOST_MEMORY_POOLS_SUPPORTED
  };
  const auto found = kAttributes.find(attribute);
  return found == kAttributes.end() ? 0 : found->second;
}

const char* name_of(int result) {
  static const std::map<int, const char*> kNames = {{kSuccess, "CUDA_SUCCESS"},
                                                    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                    {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
                                                    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                                    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                                                    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
                                                    {kNotFound, "CUDA_ERROR_NOT_FOUND"},
                                                    {kNotReady, "CUDA_ERROR_NOT_READY"},
                                                    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
                                                    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
                                                    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
                                                    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
                                                    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
                                                    {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
                                                    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"},
                                                    {kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"}};
  const auto found = kNames.find(result);
  return found == kNames.end() ? nullptr : found->second;
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;  // NOLINT: the rest of the file is the API

// For the stand-ins of NCCL and of torch's device: the allocation in which an address lies.
__attribute__((visibility("default"))) std::shared_ptr<Allocation> stand_in_find_memory(const void* address) {
  return devices().find(reinterpret_cast<uintptr_t>(address));
}
// And work for the graph into which a stream is captured; false where it is not.
__attribute__((visibility("default"))) void stand_in_free(const std::function<void()>& free) {
  std::unique_lock lock(stand_in::frees, std::defer_lock);
  if (stand_in::frees_block()) lock.lock();
  free();
}
__attribute__((visibility("default"))) bool stand_in_capture(void* handle, const Graph::Make& make) {
  const auto stream = devices().stream(handle, current_device());
  return stream != nullptr && devices().enqueue_captured(stream, make);
}
// And what a GPU does when a kernel's memory is freed.
__attribute__((visibility("default"))) void stand_in_fault() { devices().has_fault = true; }

// Initialisation and errors

CUDA_API int cuInit(unsigned) { return devices().count > 0 ? kSuccess : kNoDevice; }
CUDA_API int cuDriverGetVersion(int* version) { return give(version, 13000); }

CUDA_API int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&cuInit), &own);
  static void* library = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = dlsym(library, name);
  if (status != nullptr) *status = *function == nullptr ? 1 : 0;
  return *function == nullptr ? kNotFound : kSuccess;
}

CUDA_API int cuGetErrorName(int result, const char** name) {
  *name = name_of(result);
  return *name == nullptr ? kInvalidValue : kSuccess;
}
CUDA_API int cuGetErrorString(int result, const char** text) { return cuGetErrorName(result, text); }

// Devices and contexts

CUDA_API int cuDeviceGetCount(int* count) { return give(count, devices().count); }
CUDA_API int cuDeviceGet(int* device, int ordinal) {
  return is_device(ordinal) ? give(device, ordinal) : kInvalidDevice;
}
CUDA_API int cuDeviceGetName(char* name, int length, int device) {
  std::snprintf(name, length, "stand-in GPU %d", device);
  return kSuccess;
}
CUDA_API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  static const bool has_peers = number_from_environment("PROCGROUP_STAND_IN_NO_PEER_ACCESS", 0) == 0;
  if (!is_device(device) || !is_device(peer)) return kInvalidDevice;
  return give(can, int{has_peers && device != peer});
}
CUDA_API int cuDeviceGetUuid(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  return is_device(device) ? give(uuid + 15, static_cast<char>(devices().gpus[device] + 1)) : kInvalidDevice;
}
CUDA_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return is_device(device) ? give(value, attribute_of(attribute)) : kInvalidDevice;
}
CUDA_API int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  return is_device(device) ? give(context, context_of(device)) : kInvalidDevice;
}
CUDA_API int cuDevicePrimaryCtxRelease(int) { return kSuccess; }
CUDA_API int cuCtxGetCurrent(Handle* context) { return give(context, context_of(current_device())); }
// Like CUDA's, replaces the top of the stack, or takes it off.
CUDA_API int cuCtxSetCurrent(Handle context) {
  if (!current_contexts.empty()) current_contexts.pop_back();
  if (context != nullptr) current_contexts.push_back(device_of(context));
  return kSuccess;
}
CUDA_API int cuCtxPushCurrent(Handle context) {
  if (context == nullptr || !is_device(device_of(context))) return kInvalidContext;
  current_contexts.push_back(device_of(context));
  return kSuccess;
}
CUDA_API int cuCtxPopCurrent(Handle* context) {
  if (current_contexts.empty()) return kInvalidContext;
  if (context != nullptr) *context = context_of(current_contexts.back());
  current_contexts.pop_back();
  return kSuccess;
}
CUDA_API int cuCtxGetDevice(int* device) {
  return current_device() < 0 ? kInvalidContext : give(device, current_device());
}
CUDA_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return give(least, 0), give(greatest, -5); }
CUDA_API int cuCtxSynchronize() {
  if (is_forbidden()) return kCaptureUnsupported;
  devices().synchronize(current_device());
  return current_device() < 0 ? kInvalidContext : fault_or(kSuccess);
}

// Streams

CUDA_API int cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
  if (current_device() < 0) return kInvalidContext;
  return give<Handle>(stream, devices().create_stream(current_device(), (flags & 1) == 0, priority).get());
}
CUDA_API int cuStreamDestroy(Handle handle) {
  return with_stream(handle, [](auto& stream) { return devices().destroy_stream(stream), kSuccess; });
}
CUDA_API int cuStreamSynchronize(Handle handle) {
  return with_stream(handle, [](auto& stream) {
    if (is_forbidden() || devices().invalidates(*stream)) return kCaptureUnsupported;
    devices().wait(devices().end_of(stream));
    return fault_or(kSuccess);
  });
}
CUDA_API int cuStreamQuery(Handle handle) {
  stand_in::await_frees();
  return with_stream(handle, [](auto& stream) {
    if (is_forbidden() || devices().invalidates(*stream)) return kCaptureUnsupported;
    return fault_or(devices().is_reached(devices().end_of(stream)) ? kSuccess : kNotReady);
  });
}
CUDA_API int cuStreamGetCtx(Handle handle, Handle* context) {
  return with_stream(handle, [&](auto& stream) { return give(context, context_of(stream->device)); });
}
CUDA_API int cuStreamGetDevice(Handle handle, int* device) {
  return with_stream(handle, [&](auto& stream) { return give(device, stream->device); });
}
CUDA_API int cuStreamGetFlags(Handle handle, unsigned* flags) {
  return with_stream(
      handle, [&](auto& stream) { return give(flags, stream->waits_for_legacy || stream->is_legacy ? 0U : 1U); });
}
CUDA_API int cuStreamGetPriority(Handle handle, int* priority) {
  return with_stream(handle, [&](auto& stream) { return give(priority, stream->priority); });
}
CUDA_API int cuStreamIsCapturing(Handle handle, int* status) {
  return with_stream(handle, [&](auto& stream) {
    const auto capture = devices().capture_of(*stream);
    return give(status, capture == nullptr ? 0 : capture->is_invalid ? 2 : 1);
  });
}
CUDA_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < 0 || *mode > 2) return kInvalidValue;
  std::swap(capture_mode, *mode);
  return kSuccess;
}
CUDA_API int cuStreamWaitEvent(Handle handle, Handle event, unsigned) {
  return with_stream(handle, [&](auto& stream) {
    return devices().has_fault ? kIllegalAddress : devices().let_wait(stream, *event_of(event));
  });
}
CUDA_API int cuStreamWaitValue32(Handle stream, uintptr_t address, uint32_t value, unsigned condition) {
  if (!has_memory_operations()) return kNotSupported;
  const Place place{address, sizeof(uint32_t)};
  if (condition > 3 || !is_word(place)) return kInvalidValue;
  return submit(stream, [=] { wait_for_value(place, value, condition); });
}
CUDA_API int cuStreamWriteValue32(Handle stream, uintptr_t address, uint32_t value, unsigned flags) {
  if (!has_memory_operations()) return kNotSupported;
  const Place place{address, sizeof(uint32_t)};
  if (flags > 1 || !is_word(place)) return kInvalidValue;
  return submit(stream, [=] {
    auto* bytes = place.now();
    if (bytes == nullptr) devices().has_fault = true;
    if (bytes == nullptr) return;
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(bytes)).store(value, std::memory_order_release);
  });
}
CUDA_API int cuLaunchHostFunc(Handle stream, void (*function)(void*), void* argument) {
  return submit(stream, [function, argument] { function(argument); });
}

// Graphs

CUDA_API int cuStreamBeginCapture(Handle handle, int mode) {
  if (mode < kGlobal || mode > kRelaxed) return kInvalidValue;
  return with_stream(handle,
                     [&](auto& stream) { return devices().begin_capture(stream, static_cast<CaptureMode>(mode)); });
}
CUDA_API int cuStreamEndCapture(Handle handle, Handle* graph) {
  return with_stream(handle, [&](auto& stream) {
    Graphs captured;
    const auto result = devices().end_capture(stream, captured);
    return result == kSuccess ? give<Handle>(graph, new Graphs(captured)) : (give<Handle>(graph, nullptr), result);
  });
}
// The graph is that of the capture itself: it must not be destroyed.
CUDA_API int cuStreamGetCaptureInfo(Handle handle, int* status, uint64_t* id, Handle* graph, const Handle**, size_t*) {
  return with_stream(handle, [&](auto& stream) {
    const auto capture = devices().capture_of(*stream);
    if (id != nullptr && capture != nullptr) *id = capture->id;
    if (graph != nullptr && capture != nullptr) *graph = &capture->graph;
    return give(status, capture == nullptr ? 0 : capture->is_invalid ? 2 : 1);
  });
}
CUDA_API int cuGraphInstantiateWithFlags(Handle* made, Handle graph, uint64_t) {
  return give<Handle>(made, new Graphs(*static_cast<Graphs*>(graph)));
}
CUDA_API int cuGraphInstantiate(Handle* made, Handle graph, uint64_t flags) {
  return cuGraphInstantiateWithFlags(made, graph, flags);
}
CUDA_API int cuGraphLaunch(Handle made, Handle handle) {
  return with_stream(handle, [&](auto& stream) {
    if (devices().has_fault) return kIllegalAddress;
    devices().launch(**static_cast<Graphs*>(made), stream);
    return kSuccess;
  });
}
CUDA_API int cuGraphDestroy(Handle graph) {
  delete static_cast<Graphs*>(graph);
  return kSuccess;
}
CUDA_API int cuGraphExecDestroy(Handle made) { return cuGraphDestroy(made); }
CUDA_API int cuUserObjectCreate(Handle* object, void* pointer, void (*end)(void*), unsigned count, unsigned flags) {
  if (count != 1 || flags != 1) return kInvalidValue;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
  return give<Handle>(object, new std::shared_ptr<UserObject>(new UserObject(pointer, end)));
}
CUDA_API int cuGraphRetainUserObject(Handle graph, Handle handle, unsigned count, unsigned flags) {
  if (count != 1 || flags != 1) return kInvalidValue;  // CU_GRAPH_USER_OBJECT_MOVE
  auto* const object = static_cast<std::shared_ptr<UserObject>*>(handle);
  (*static_cast<Graphs*>(graph))->kept.push_back(*object);
  delete object;
  return kSuccess;
}

// Events

CUDA_API int cuEventCreate(Handle* event, unsigned) {
  if (current_device() < 0) return kInvalidContext;
  return give<Handle>(event, new std::shared_ptr<Event>(new Event));
}
CUDA_API int cuEventDestroy(Handle event) {
  delete &event_of(event);
  return kSuccess;
}
CUDA_API int cuEventRecord(Handle event, Handle handle) {
  return with_stream(handle, [&](auto& stream) {
    if (devices().has_fault || !devices().record(event_of(event), stream)) return kIllegalAddress;
    return kSuccess;
  });
}
CUDA_API int cuEventQuery(Handle event) {
  stand_in::await_frees();
  if (is_forbidden()) return kCaptureUnsupported;
  if (devices().is_captured(*event_of(event))) return kCapturedEvent;
  return fault_or(devices().is_reached(devices().position_of(*event_of(event))) ? kSuccess : kNotReady);
}
CUDA_API int cuEventSynchronize(Handle event) {
  if (is_forbidden()) return kCaptureUnsupported;
  if (devices().is_captured(*event_of(event))) return kCapturedEvent;
  devices().wait(devices().position_of(*event_of(event)));
  return fault_or(kSuccess);
}
CUDA_API int cuEventElapsedTime(float* milliseconds, Handle begin, Handle end) {
  if (cuEventQuery(begin) != kSuccess || cuEventQuery(end) != kSuccess) return kNotReady;
  const std::chrono::duration<float, std::milli> elapsed =
      devices().time_of(*event_of(end)) - devices().time_of(*event_of(begin));
  return give(milliseconds, elapsed.count());
}

// Memory

CUDA_API int cuMemAlloc(uintptr_t* address, size_t bytes) { return allocate(address, bytes, current_device(), false); }
CUDA_API int cuMemFree(uintptr_t address) { return free_now(address); }
CUDA_API int cuMemAllocHost(uintptr_t* address, size_t bytes) {
  return allocate(address, bytes, current_device(), true);
}
CUDA_API int cuMemHostAlloc(uintptr_t* address, size_t bytes, unsigned flags) {
  return flags > 7 ? kInvalidValue : allocate(address, bytes, current_device(), true);
}
// The same address, as CUDA has it for all pinned memory.
CUDA_API int cuMemHostGetDevicePointer(uintptr_t* on_device, uintptr_t address, unsigned flags) {
  const auto allocation = devices().find(address);
  const bool is_valid = flags == 0 && allocation != nullptr && allocation->is_pinned_host;
  return is_valid ? give(on_device, address) : kInvalidValue;
}
CUDA_API int cuMemFreeHost(uintptr_t address) { return free_now(address); }
CUDA_API int cuMemHostRegister(uintptr_t address, size_t bytes, unsigned) {
  if (current_device() < 0) return kInvalidContext;
  if (is_forbidden()) return kCaptureUnsupported;
  return devices().add_registered(address, bytes, current_device()) ? kSuccess : kAlreadyRegistered;
}
CUDA_API int cuMemHostUnregister(uintptr_t address) {
  return current_device() < 0 ? kInvalidContext : free_now(address);
}
CUDA_API int cuMemAllocFromPoolAsync(uintptr_t* address, size_t bytes, Handle pool, Handle) {
  const bool is_host = uintptr_t(pool) == kHostPool;
  const int device = is_host ? current_device() : static_cast<int>(uintptr_t(pool) - kPools);
  if (device < 0 || bytes == 0) return kInvalidValue;
  return give(address, devices().allocate(bytes, device, is_host));
}
// Memory of a graph has one address at all launches: here it is never freed.
CUDA_API int cuMemFreeAsync(uintptr_t address, Handle handle) {
  return with_stream(handle, [&](auto& stream) -> Result {
    if (devices().capture_of(*stream) != nullptr) return kSuccess;
    return submit(handle, [address] { devices().free(address); });
  });
}

CUDA_API int cuDeviceGetMemPool(Handle* pool, int device) { return give(pool, handle_of(kPools + device)); }
CUDA_API int cuMemGetMemPool(Handle* pool, const void*, int) { return give(pool, handle_of(kHostPool)); }
CUDA_API int cuMemPoolGetAttribute(Handle, int, uint64_t* value) { return give<uint64_t>(value, 0); }
CUDA_API int cuMemPoolSetAttribute(Handle, int, void*) { return kSuccess; }

CUDA_API int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, Handle stream) {
  return copy(to, from, bytes, stream, false);
}
CUDA_API int cuMemcpyHtoDAsync(uintptr_t to, uintptr_t from, size_t bytes, Handle stream) {
  return copy(to, from, bytes, stream, false);
}
CUDA_API int cuMemcpyDtoHAsync(uintptr_t to, uintptr_t from, size_t bytes, Handle stream) {
  return copy(to, from, bytes, stream, false);
}
CUDA_API int cuMemcpyHtoD(uintptr_t to, uintptr_t from, size_t bytes) { return copy(to, from, bytes, nullptr, true); }
CUDA_API int cuMemcpyDtoH(uintptr_t to, uintptr_t from, size_t bytes) { return copy(to, from, bytes, nullptr, true); }
CUDA_API int cuMemsetD8Async(uintptr_t to, uint8_t value, size_t count, Handle stream) {
  return fill(to, value, count, stream);
}
CUDA_API int cuMemsetD16Async(uintptr_t to, uint16_t value, size_t count, Handle stream) {
  return fill(to, value, count, stream);
}
CUDA_API int cuMemsetD32Async(uintptr_t to, uint32_t value, size_t count, Handle stream) {
  return fill(to, value, count, stream);
}

CUDA_API int cuPointerGetAttribute(void* value, int attribute, uintptr_t address) {
  auto allocation = devices().find(address);
  if (allocation == nullptr) return kInvalidValue;
  const bool is_host = allocation->is_pinned_host;
  if (attribute == 1) return give(static_cast<Handle*>(value), context_of(allocation->device));  // CONTEXT
  if (attribute == 2) return give(static_cast<unsigned*>(value), is_host ? 1U : 2U);             // MEMORY_TYPE
  if (attribute == 3) return give(static_cast<uintptr_t*>(value), address);                      // DEVICE_POINTER
  if (attribute == 4) return give(static_cast<uintptr_t*>(value), is_host ? address : 0);        // HOST_POINTER
  if (attribute == 8) return give(static_cast<unsigned*>(value), 0U);                            // IS_MANAGED
  if (attribute == 9) return give(static_cast<int*>(value), allocation->device);                 // DEVICE_ORDINAL
  return kInvalidValue;
}
CUDA_API int cuPointerGetAttributes(unsigned count, const int* attributes, void** values, uintptr_t address) {
  for (unsigned i = 0; i < count; ++i) {
    if (cuPointerGetAttribute(values[i], attributes[i], address) != kSuccess) std::memset(values[i], 0, sizeof(int));
  }
  return kSuccess;
}
