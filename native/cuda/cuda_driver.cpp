#include "cuda/cuda_driver.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace procgroup {
namespace {

constexpr int kVersion = 12000;  // of the functions
using GetAddress = int (*)(const char* name, void** function, int version, uint64_t flags, int* status);

GetAddress address_getter() {
  constexpr const char* kName = "cuGetProcAddress_v2";
  void* found = dlsym(RTLD_DEFAULT, kName);
  if (found == nullptr) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library != nullptr) found = dlsym(library, kName);
  }
  if (found == nullptr) throw std::runtime_error("this host has no CUDA driver of version 12 or later (libcuda.so.1)");
  return reinterpret_cast<GetAddress>(found);
}

template <class Function>
void find(GetAddress address_of, Function& function, const char* name, bool is_optional = false) {
  void* found = nullptr;
  const int result = address_of(name, &found, kVersion, 0, nullptr);
  if ((result != 0 || found == nullptr) && !is_optional)
    throw std::runtime_error(std::string("the CUDA driver has no function ") + name);
  function = reinterpret_cast<Function>(found);
}

CudaDriver load() {
  const GetAddress get = address_getter();
  CudaDriver driver{};
#define PROCGROUP_FIND(NAME, ...) find(get, driver.NAME, #NAME, ##__VA_ARGS__)
  PROCGROUP_FIND(cuInit);
  PROCGROUP_FIND(cuGetErrorName);
  PROCGROUP_FIND(cuGetErrorString);
  PROCGROUP_FIND(cuDriverGetVersion);
  PROCGROUP_FIND(cuDeviceGetCount);
  PROCGROUP_FIND(cuDeviceGet);
  PROCGROUP_FIND(cuDeviceGetName);
  PROCGROUP_FIND(cuDeviceGetUuid);
  PROCGROUP_FIND(cuDeviceCanAccessPeer);
  PROCGROUP_FIND(cuDevicePrimaryCtxRetain);
  PROCGROUP_FIND(cuCtxGetCurrent);
  PROCGROUP_FIND(cuCtxSetCurrent);
  PROCGROUP_FIND(cuCtxGetDevice);
  PROCGROUP_FIND(cuCtxSynchronize);
  PROCGROUP_FIND(cuStreamCreateWithPriority);
  PROCGROUP_FIND(cuStreamDestroy);
  PROCGROUP_FIND(cuStreamGetCtx);
  PROCGROUP_FIND(cuStreamQuery);
  PROCGROUP_FIND(cuStreamWaitEvent);
  PROCGROUP_FIND(cuStreamWaitValue32, true);
  PROCGROUP_FIND(cuStreamWriteValue32, true);
  PROCGROUP_FIND(cuStreamGetCaptureInfo);
  PROCGROUP_FIND(cuThreadExchangeStreamCaptureMode);
  PROCGROUP_FIND(cuUserObjectCreate);
  PROCGROUP_FIND(cuGraphRetainUserObject);
  PROCGROUP_FIND(cuEventCreate);
  PROCGROUP_FIND(cuEventRecord);
  PROCGROUP_FIND(cuEventQuery);
  PROCGROUP_FIND(cuMemHostRegister);
  PROCGROUP_FIND(cuMemHostUnregister);
  PROCGROUP_FIND(cuMemcpyAsync);
  PROCGROUP_FIND(cuMemsetD8Async);
  PROCGROUP_FIND(cuDeviceGetMemPool);
  PROCGROUP_FIND(cuMemAllocFromPoolAsync);
  PROCGROUP_FIND(cuMemFreeAsync);
  PROCGROUP_FIND(cuPointerGetAttribute);
#undef PROCGROUP_FIND
  driver.require(driver.cuInit(0));
  return driver;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver = load();
  return driver;
}

int CudaDriver::count() const {
  int count = 0;
  require(cuDeviceGetCount(&count));
  return count;
}

int CudaDriver::version() const {
  int version = 0;
  require(cuDriverGetVersion(&version));
  return version;
}

void CudaDriver::require(int result) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != 0 || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &text) != 0 || text == nullptr) text = "";
  throw std::runtime_error("CUDA: " + std::string(name) + " (" + std::to_string(result) + "), " + text);
}

}  // namespace procgroup
