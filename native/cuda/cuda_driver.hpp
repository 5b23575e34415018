// CUDA's driver, which this process may have or not, called without its header.
//
// The driver gives the address of each function by its name without a suffix, in the version that is asked for.
#pragma once

#include <cstddef>
#include <cstdint>

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

struct CudaDriver {
  int (*cuInit)(unsigned flags);
  int (*cuGetErrorName)(int result, const char** name);
  int (*cuGetErrorString)(int result, const char** text);
  int (*cuDriverGetVersion)(int* version);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGet)(int* device, int number);
  int (*cuDeviceGetName)(char* name, int bytes, int device);
  int (*cuDeviceGetUuid)(char* uuid, int device);  // 16 bytes
  int (*cuDeviceCanAccessPeer)(int* can, int device, int peer);
  int (*cuDevicePrimaryCtxRetain)(CudaContext* context, int device);
  int (*cuCtxGetCurrent)(CudaContext* context);
  int (*cuCtxSetCurrent)(CudaContext context);
  int (*cuCtxGetDevice)(int* device);
  int (*cuCtxSynchronize)();
  int (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned flags, int priority);
  int (*cuStreamDestroy)(CudaStream stream);
  int (*cuStreamGetCtx)(CudaStream stream, CudaContext* context);
  int (*cuStreamQuery)(CudaStream stream);
  int (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  // Not all devices and drivers have the next two.
  int (*cuStreamWaitValue32)(CudaStream stream, CudaAddress address, uint32_t value, unsigned flags);
  int (*cuStreamWriteValue32)(CudaStream stream, CudaAddress address, uint32_t value, unsigned flags);
  int (*cuStreamGetCaptureInfo)(CudaStream stream, int* status, uint64_t* number, CudaGraph* graph, void* dependencies,
                                size_t* count);
  int (*cuThreadExchangeStreamCaptureMode)(int* mode);
  int (*cuUserObjectCreate)(CudaUserObject* object, void* pointer, void (*end)(void*), unsigned count, unsigned flags);
  int (*cuGraphRetainUserObject)(CudaGraph graph, CudaUserObject object, unsigned count, unsigned flags);
  int (*cuEventCreate)(CudaEvent* event, unsigned flags);
  int (*cuEventRecord)(CudaEvent event, CudaStream stream);
  int (*cuEventQuery)(CudaEvent event);
  int (*cuMemHostRegister)(void* address, size_t bytes, unsigned flags);
  int (*cuMemHostUnregister)(void* address);
  int (*cuMemcpyAsync)(CudaAddress to, CudaAddress from, size_t bytes, CudaStream stream);
  int (*cuMemsetD8Async)(CudaAddress to, unsigned char value, size_t bytes, CudaStream stream);
  int (*cuDeviceGetMemPool)(CudaMemoryPool* pool, int device);
  int (*cuMemAllocFromPoolAsync)(CudaAddress* address, size_t bytes, CudaMemoryPool pool, CudaStream stream);
  int (*cuMemFreeAsync)(CudaAddress address, CudaStream stream);
  int (*cuPointerGetAttribute)(void* value, int attribute, CudaAddress address);

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
