// CUDA's driver, which this process may have or not, called without its header.
//
// The driver gives the address of each function by its name without a suffix, in the version that is asked for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/function_address.hpp"

namespace procgroup {

// Handles of CUDA. A stream is one, or a number: 1 is the legacy default stream, 2 the default stream of the thread.
using CudaStream = void*;
using CudaEvent = void*;
using CudaContext = void*;
using CudaMemoryPool = void*;
using CudaGraph = void*;
using CudaUserObject = void*;
inline CudaStream legacy_stream() { return reinterpret_cast<CudaStream>(1); }
inline CudaStream per_thread_stream() { return reinterpret_cast<CudaStream>(2); }
using CudaAddress = uintptr_t;

class CudaDriver {
  CudaDriver();
  static FunctionAddress find(const char* name, bool is_optional = false);

 public:
  int (*cuInit)(unsigned flags) = find("cuInit");
  int (*cuGetErrorName)(int result, const char** name) = find("cuGetErrorName");
  int (*cuGetErrorString)(int result, const char** text) = find("cuGetErrorString");
  int (*cuDriverGetVersion)(int* version) = find("cuDriverGetVersion");
  int (*cuDeviceGetCount)(int* count) = find("cuDeviceGetCount");
  int (*cuDeviceGet)(int* device, int number) = find("cuDeviceGet");
  int (*cuDeviceGetName)(char* name, int bytes, int device) = find("cuDeviceGetName");
  int (*cuDeviceGetUuid)(char* uuid, int device) = find("cuDeviceGetUuid");  // 16 bytes
  int (*cuDeviceCanAccessPeer)(int* can, int device, int peer) = find("cuDeviceCanAccessPeer");
  int (*cuDevicePrimaryCtxRetain)(CudaContext* context, int device) = find("cuDevicePrimaryCtxRetain");
  int (*cuCtxGetCurrent)(CudaContext* context) = find("cuCtxGetCurrent");
  int (*cuCtxSetCurrent)(CudaContext context) = find("cuCtxSetCurrent");
  int (*cuCtxGetDevice)(int* device) = find("cuCtxGetDevice");
  int (*cuCtxSynchronize)() = find("cuCtxSynchronize");
  int (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned flags,
                                    int priority) = find("cuStreamCreateWithPriority");
  int (*cuStreamDestroy)(CudaStream stream) = find("cuStreamDestroy");
  int (*cuStreamGetCtx)(CudaStream stream, CudaContext* context) = find("cuStreamGetCtx");
  int (*cuStreamQuery)(CudaStream stream) = find("cuStreamQuery");
  int (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags) = find("cuStreamWaitEvent");
  // Not all devices and drivers have the next two.
  int (*cuStreamWaitValue32)(CudaStream stream, CudaAddress address, uint32_t value,
                             unsigned flags) = find("cuStreamWaitValue32", true);
  int (*cuStreamWriteValue32)(CudaStream stream, CudaAddress address, uint32_t value,
                              unsigned flags) = find("cuStreamWriteValue32", true);
  int (*cuStreamGetCaptureInfo)(CudaStream stream, int* status, uint64_t* number, CudaGraph* graph, void* dependencies,
                                size_t* count) = find("cuStreamGetCaptureInfo");
  int (*cuThreadExchangeStreamCaptureMode)(int* mode) = find("cuThreadExchangeStreamCaptureMode");
  int (*cuUserObjectCreate)(CudaUserObject* object, void* pointer, void (*end)(void*), unsigned count,
                            unsigned flags) = find("cuUserObjectCreate");
  int (*cuGraphRetainUserObject)(CudaGraph graph, CudaUserObject object, unsigned count,
                                 unsigned flags) = find("cuGraphRetainUserObject");
  int (*cuEventCreate)(CudaEvent* event, unsigned flags) = find("cuEventCreate");
  int (*cuEventRecord)(CudaEvent event, CudaStream stream) = find("cuEventRecord");
  int (*cuEventQuery)(CudaEvent event) = find("cuEventQuery");
  int (*cuMemHostRegister)(void* address, size_t bytes, unsigned flags) = find("cuMemHostRegister");
  int (*cuMemHostUnregister)(void* address) = find("cuMemHostUnregister");
  int (*cuMemcpyAsync)(CudaAddress to, CudaAddress from, size_t bytes, CudaStream stream) = find("cuMemcpyAsync");
  int (*cuMemsetD8Async)(CudaAddress to, unsigned char value, size_t bytes,
                         CudaStream stream) = find("cuMemsetD8Async");
  int (*cuDeviceGetMemPool)(CudaMemoryPool* pool, int device) = find("cuDeviceGetMemPool");
  int (*cuMemAllocFromPoolAsync)(CudaAddress* address, size_t bytes, CudaMemoryPool pool,
                                 CudaStream stream) = find("cuMemAllocFromPoolAsync");
  int (*cuMemFreeAsync)(CudaAddress address, CudaStream stream) = find("cuMemFreeAsync");
  int (*cuPointerGetAttribute)(void* value, int attribute, CudaAddress address) = find("cuPointerGetAttribute");

  // That of this process, loaded at the first call. Throws std::runtime_error where there is none.
  static const CudaDriver& get();
  // How many GPUs this process has. Throws std::runtime_error for an error.
  int count() const;
  // The version of CUDA that the driver is for: 13020 is 13.2. Throws std::runtime_error for an error.
  int version() const;
  // Throws std::runtime_error, with the driver's name and text of the error, unless a function has succeeded.
  void require(int result) const;
};

}  // namespace procgroup
