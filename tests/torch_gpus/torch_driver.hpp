// The stand-in of CUDA's driver, as torch's device uses it: its functions, and the device and streams of each thread.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <mutex>

using Handle = void*;

extern "C" {  // of the stand-in for libcuda.so.1
int cuInit(unsigned flags);
int cuGetErrorName(int result, const char** name);
int cuDeviceGetCount(int* count);
int cuDevicePrimaryCtxRetain(Handle* context, int device);
int cuCtxSetCurrent(Handle context);
int cuCtxGetDevice(int* device);
int cuCtxSynchronize();
int cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority);
int cuStreamSynchronize(Handle stream);
int cuStreamQuery(Handle stream);
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags);
int cuStreamIsCapturing(Handle stream, int* status);
int cuStreamBeginCapture(Handle stream, int mode);
int cuStreamEndCapture(Handle stream, Handle* graph);
int cuStreamGetCaptureInfo(Handle stream, int* status, uint64_t* id, Handle* graph, const Handle** edges, size_t* count);
int cuThreadExchangeStreamCaptureMode(int* mode);
int cuGraphInstantiateWithFlags(Handle* made, Handle graph, uint64_t flags);
int cuGraphLaunch(Handle made, Handle stream);
int cuGraphDestroy(Handle graph);
int cuGraphExecDestroy(Handle made);
int cuEventCreate(Handle* event, unsigned flags);
int cuEventDestroy(Handle event);
int cuEventRecord(Handle event, Handle stream);
int cuEventQuery(Handle event);
int cuEventSynchronize(Handle event);
int cuEventElapsedTime(float* milliseconds, Handle begin, Handle end);
int cuMemAlloc(uintptr_t* address, size_t bytes);
int cuMemFree(uintptr_t address);
int cuMemFreeAsync(uintptr_t address, Handle stream);
int cuMemAllocHost(uintptr_t* address, size_t bytes);
int cuMemFreeHost(uintptr_t address);
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, Handle stream);
int cuPointerGetAttribute(void* value, int attribute, uintptr_t address);
}

namespace stand_in_torch {

constexpr int kSuccess = 0, kNotReady = 600, kCaptureUnsupported = 900, kCaptureInvalidated = 901;
constexpr int kMostDevices = 16;

inline void check(int result, const char* what) {
  const char* name = nullptr;
  if (result != kSuccess) cuGetErrorName(result, &name);
  TORCH_CHECK(result == kSuccess, "stand-in GPU: ", what, " gives ", result, " (", name == nullptr ? "?" : name, ")");
}
#define CHECKED(call) ::stand_in_torch::check(call, #call)

inline c10::DeviceIndex device_count() noexcept {
  int count = 0;
  return cuInit(0) == kSuccess && cuDeviceGetCount(&count) == kSuccess ? static_cast<c10::DeviceIndex>(count) : 0;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local bool has_context = false;
inline thread_local std::array<int64_t, kMostDevices> current_streams{};

inline void make_current(c10::DeviceIndex device) {
  static std::array<Handle, kMostDevices> contexts{};
  static std::mutex mutex;
  Handle context = nullptr;
  {
    const std::lock_guard lock(mutex);
    CHECKED(cuInit(0));
    TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal ", int{device});
    if (contexts[device] == nullptr) CHECKED(cuDevicePrimaryCtxRetain(&contexts[device], device));
    context = contexts[device];
  }
  CHECKED(cuCtxSetCurrent(context));
  current_device = device;
  has_context = true;
}

inline Handle handle_of(int64_t stream) { return reinterpret_cast<Handle>(stream); }
inline Handle current_stream() { return handle_of(current_streams[current_device]); }

// For the body: a device's context in this thread.
class On {
 public:
  explicit On(c10::DeviceIndex device) : before_(current_device) { make_current(device); }
  On(const On&) = delete;
  On& operator=(const On&) = delete;
  ~On() { make_current(before_); }

 private:
  c10::DeviceIndex before_;
};

// For the body: this thread may make calls that could disturb a capture, because they concern nothing of it.
class BesideCaptures {
 public:
  BesideCaptures() { cuThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures() { cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
};

}  // namespace stand_in_torch
