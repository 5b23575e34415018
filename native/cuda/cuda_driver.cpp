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

}  // namespace

CudaDriver::CudaDriver() { require(cuInit(0)); }

FunctionAddress CudaDriver::find(const char* name, bool is_optional) {
  static const GetAddress address_of = address_getter();
  void* found = nullptr;
  const int result = address_of(name, &found, kVersion, 0, nullptr);
  if ((result != 0 || found == nullptr) && !is_optional)
    throw std::runtime_error(std::string("the CUDA driver has no function ") + name);
  return {found};
}

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver;
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
