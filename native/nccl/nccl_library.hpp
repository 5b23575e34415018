// NCCL, loaded into this process and called without its header.
//
// Numbers and structures are those of nccl.h, which only ever appends to them
// (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "base/function_address.hpp"
#include "cuda/cuda_driver.hpp"
#include "ops/descriptor.hpp"

namespace procgroup {

using NcclHandle = void*;  // ncclComm_t

struct NcclId {  // ncclUniqueId
  std::array<char, 128> bytes;
};

// Python's objects share it with threads, which let go of it without the language: as its own owner knows how.
class NcclLibrary : public std::enable_shared_from_this<NcclLibrary> {
  void* const library_;
  FunctionAddress find(const char* name, bool is_optional = false) const;

 public:
  // The library that this process has loaded already, as torch does; else the one at `path`; else the system's. Throws
  // std::runtime_error, with the loader's text, where there is none.
  explicit NcclLibrary(const std::string& path);

  int version() const;
  // Throws std::runtime_error, with NCCL's texts, unless a function has succeeded.
  void require(int result) const;

  int (*ncclGetUniqueId)(NcclId* id) = find("ncclGetUniqueId");
  int (*ncclCommInitRankConfig)(NcclHandle* communicator, int size, NcclId id, int rank,
                                void* config) = find("ncclCommInitRankConfig");
  int (*ncclCommGetAsyncError)(NcclHandle communicator, int* error) = find("ncclCommGetAsyncError");
  int (*ncclCommFinalize)(NcclHandle communicator) = find("ncclCommFinalize");
  int (*ncclCommDestroy)(NcclHandle communicator) = find("ncclCommDestroy");
  int (*ncclCommAbort)(NcclHandle communicator) = find("ncclCommAbort");
  int (*ncclGroupStart)() = find("ncclGroupStart");
  int (*ncclGroupEnd)() = find("ncclGroupEnd");
  int (*ncclAllReduce)(const void*, void*, size_t count, int type, int op, NcclHandle,
                       CudaStream) = find("ncclAllReduce");
  int (*ncclBroadcast)(const void*, void*, size_t count, int type, int root, NcclHandle,
                       CudaStream) = find("ncclBroadcast");
  int (*ncclReduce)(const void*, void*, size_t count, int type, int op, int root, NcclHandle,
                    CudaStream) = find("ncclReduce");
  int (*ncclAllGather)(const void*, void*, size_t count, int type, NcclHandle, CudaStream) = find("ncclAllGather");
  int (*ncclReduceScatter)(const void*, void*, size_t count, int type, int op, NcclHandle,
                           CudaStream) = find("ncclReduceScatter");
  int (*ncclSend)(const void*, size_t count, int type, int peer, NcclHandle, CudaStream) = find("ncclSend");
  int (*ncclRecv)(void*, size_t count, int type, int peer, NcclHandle, CudaStream) = find("ncclRecv");
  int (*ncclRedOpCreatePreMulSum)(int* op, const void* factor, int type, int residence,
                                  NcclHandle) = find("ncclRedOpCreatePreMulSum");
  int (*ncclRedOpDestroy)(int op, NcclHandle) = find("ncclRedOpDestroy");
  int (*ncclMemAlloc)(void** memory, size_t bytes) = find("ncclMemAlloc");
  int (*ncclMemFree)(void* memory) = find("ncclMemFree");
  int (*ncclCommWindowRegister)(NcclHandle, void* memory, size_t bytes, void** window,
                                int flags) = find("ncclCommWindowRegister", true);  // null before 2.27

 private:
  int (*ncclGetVersion)(int* version) = find("ncclGetVersion");
  const char* (*ncclGetErrorString)(int result) = find("ncclGetErrorString");
  const char* (*ncclGetLastError)(NcclHandle) = find("ncclGetLastError");
};

// In which elements NCCL handles memory, and by which operation it combines them.
struct NcclType {
  int number;
  size_t bytes;
  int op = 0;  // of PREMUL_SUM none: it is made for the call
};

// What is only moved is moved as bytes.
inline constexpr NcclType kNcclBytes{1, 1};
// How NCCL combines elements; nothing where it does not, or not as procgroup does: its mean of integers is that of a
// sum that may have wrapped around.
std::optional<NcclType> nccl_reduction(ReduceOp op, Dtype dtype);
// Whether NCCL makes such calls.
bool nccl_supports(OpKind op, Dtype dtype, ReduceOp reduce_op);

}  // namespace procgroup
