// A stand-in libnccl.so.2: NCCL's functions for the ranks of one host, on the streams of the stand-in libcuda.so.1.
//
// There are the functions that procgroup and benchmarks/gpu.py call, and communicators that block, as theirs do.
//
// Stricter than NCCL: pointers are always checked, each collective compares the calls of all ranks and ends once all
// ranks are in it, a send ends when it is received, and a handle that was destroyed is known to be so.
//
// PROCGROUP_STAND_IN_NCCL_FAIL="allreduce:3:system,init:1:hang" lets the third AllReduce of this process fail, once
// its stream comes to it, and the first init never end. Names are NCCL's functions', in small letters. Kinds: cuda,
// system, internal, argument, usage, remote, timeout: the error that ncclCommGetAsyncError then returns; hang: no
// error and no end; with "call-" in front, as in call-system, the call itself returns the error.
// PROCGROUP_STAND_IN_NCCL_VERSION is what ncclGetVersion returns, 22807 if it is not set.
//
// As unforgiving as NCCL, where its documentation says little:
// - The first collective on a communicator blocks the host until all ranks are in theirs, or until an abort.
// - ncclCommAbort waits for all kernels that run on the GPU, also those of other communicators, and until the streams
//   have come to the work that is queued on this communicator. To abort several, call it for each between
//   ncclGroupStart and ncclGroupEnd: the end of the group waits for all.
// - In a group, what asks for the state of a communicator with operations in the group, or ends it, is refused.
// - Memory must not be freed while a communicator has it in a window: that ends the process.
// - PROCGROUP_STAND_IN_NCCL_LATE_ABORT=1: a kernel that begins after the abort spoils the first bytes of its receive
//   buffer, up to 64 become 0xEE, and then leaves; a real one looks at the abort flag only after some 10,000 spins.
#include <sys/random.h>

#include <algorithm>
#include <climits>
#include <cstdio>

#include "cuda_device.hpp"
#include "nccl_group.hpp"

#define NCCL_API extern "C" __attribute__((visibility("default")))

extern "C" {
int cuCtxGetDevice(int* device);
int cuMemAlloc(uintptr_t* address, size_t bytes);
int cuMemFree(uintptr_t address);
}

using namespace stand_in::nccl;  // NOLINT: this file is the API

namespace {

constexpr const char* kIdPrefix = "procgroup-stand-in-";
constexpr unsigned kConfigMagic = 0xcafebeef;

struct UniqueId {
  char letters[128];
};

// The beginning of ncclConfig_t; the members after it have no meaning here.
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

struct Memory {
  size_t bytes;
  std::weak_ptr<Communicator> user{};
};
std::mutex memories_mutex;
std::map<uintptr_t, Memory> memories;  // of ncclMemAlloc

template <class T>
Status give(T* output, T value) {
  *output = value;
  return kSuccess;
}

std::string id_of(const UniqueId& id) {
  const std::string letters(id.letters, strnlen(id.letters, sizeof(id.letters)));
  require(letters.rfind(kIdPrefix, 0) == 0, kInvalidArgument, "the unique id is not of the stand-in's ncclGetUniqueId");
  return letters;
}

int current_device() {
  int device;
  require(cuCtxGetDevice(&device) == 0, kUnhandledCudaError, "Cuda failure 'invalid device context'");
  return device;
}

Status init(Comm* comm, const std::string& id, int size, int rank) {
  require(size > 0, kInvalidArgument, "invalid device count (", size, ") requested");
  require(rank >= 0 && rank < size, kInvalidArgument, "rank ", rank, " exceeds ndev=", size);
  const auto communicator = std::make_shared<Communicator>(id, rank, size, current_device());
  if (const auto failure = requested_failure("init")) {
    require(*failure == kInProgress, *failure, "failed on request");
    communicator->hang();
  }
  communicator->connect();
  *comm = publish(communicator);
  return kSuccess;
}

Status finalize(Communicator& communicator) {
  communicator.is_finalized = true;
  return communicator.flush() && communicator.gather({}) ? kSuccess : kInternalError;
}

}  // namespace

NCCL_API Status ncclGetVersion(int* version) {
  return give(version, int(stand_in::number_from_environment("PROCGROUP_STAND_IN_NCCL_VERSION", 22807)));
}

NCCL_API const char* ncclGetErrorString(Status status) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                    "internal error - please report this issue to the NCCL developers",
                                    "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                    "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress",
                                    "timeout"};
  return status >= kSuccess && status <= kTimeout ? kTexts[status] : "unknown result code";
}

// Of the process, as in NCCL, which ignores the communicator too.
NCCL_API const char* ncclGetLastError(Comm) {
  thread_local std::string copy;
  copy = last_error();
  return copy.c_str();
}

// Initialisation and end

NCCL_API Status ncclGetUniqueId(UniqueId* id) {
  uint64_t random[2];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) return kSystemError;
  *id = {};
  std::snprintf(id->letters, sizeof(id->letters), "%s%016lx%016lx", kIdPrefix, random[0], random[1]);
  return kSuccess;
}

NCCL_API Status ncclCommInitRank(Comm* comm, int size, UniqueId id, int rank) {
  return guarded([&] { return init(comm, id_of(id), size, rank); });
}
NCCL_API Status ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  return guarded([&] {
    require(config->magic == kConfigMagic, kInvalidArgument, "ncclConfig_t argument not initialized");
    require(config->blocking != 0, kInvalidArgument, "CommInitRank : communicators block, in the stand-in");
    return init(comm, id_of(id), size, rank);
  });
}

NCCL_API Status ncclCommGetAsyncError(Comm comm, Status* status) {
  return guarded([&] {
    auto communicator = find(comm, "CommGetAsyncError");
    require_none_in_group(communicator, "CommGetAsyncError");
    return give(status, communicator->state());
  });
}
NCCL_API Status ncclCommFinalize(Comm comm) {
  return guarded([&] {
    require_none_in_group(find(comm, "CommFinalize"), "CommFinalize");
    auto communicator = ready(comm, "CommFinalize");
    require(!communicator->is_finalized, kInvalidUsage, "CommFinalize : the communicator was finalized");
    return finalize(*communicator);
  });
}
// A communicator that failed ends at once; otherwise all ranks must call it, if they have not finalized before.
NCCL_API Status ncclCommDestroy(Comm comm) {
  return guarded([&] {
    auto communicator = find(comm, "CommDestroy");
    require_none_in_group(communicator, "CommDestroy");
    if (communicator->state() == kSuccess && !communicator->is_finalized) finalize(*communicator);
    communicator->wait_for_graphs();
    take(comm, "CommDestroy");
    communicator->abort();
    communicator->wait_for_kernels();
    return kSuccess;
  });
}
NCCL_API Status ncclCommAbort(Comm comm) {
  return guarded([&] { return add_abort(take(comm, "CommAbort")); });
}

NCCL_API Status ncclGroupStart() {
  start_group();
  return kSuccess;
}
NCCL_API Status ncclGroupEnd() {
  return guarded([] {
    require(is_in_group(), kInvalidUsage, "ncclGroupEnd: not in a group call.");
    return end_group();
  });
}

// Memory and reductions

NCCL_API Status ncclMemAlloc(void** pointer, size_t bytes) {
  return guarded([&] {
    require(!requested_failure("memalloc"), kUnhandledCudaError, "Cuda failure 2 'out of memory'");
    uintptr_t address = 0;
    require(cuMemAlloc(&address, bytes) == 0, kUnhandledCudaError, "Cuda failure");
    *pointer = reinterpret_cast<void*>(address);
    const std::lock_guard lock(memories_mutex);
    memories[address] = {bytes};
    return kSuccess;
  });
}
NCCL_API Status ncclMemFree(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  {
    const std::lock_guard lock(memories_mutex);
    if (memories.count(address) == 0 || !memories[address].user.expired()) {
      std::fprintf(stderr, "stand-in NCCL: ncclMemFree of memory that is in a window, or that is not there\n");
      std::abort();
    }
    memories.erase(address);
  }
  return cuMemFree(address) == 0 ? kSuccess : kUnhandledCudaError;
}
NCCL_API Status ncclCommWindowRegister(Comm comm, void* buffer, size_t bytes, void** window, int flags) {
  return guarded([&] {
    auto communicator = ready(comm, "CommWindowRegister");
    const auto address = reinterpret_cast<uintptr_t>(buffer);
    require(flags == 1 && bytes % 4096 == 0, kInvalidArgument, "CommWindowRegister : invalid flags or size");
    {
      const std::lock_guard lock(memories_mutex);
      const bool is_known = memories.count(address) > 0 && memories[address].bytes >= bytes;
      require(is_known, kInvalidArgument, "CommWindowRegister : not memory of ncclMemAlloc, in the stand-in");
      memories[address].user = communicator;
    }
    const auto* own = reinterpret_cast<const std::byte*>(&bytes);
    const Bytes size(own, own + sizeof(bytes));
    const auto all = communicator->gather(size);
    if (!all) return kInternalError;
    const bool are_equal = std::all_of(all->begin(), all->end(), [&](const Bytes& other) { return other == size; });
    require(are_equal, kInvalidArgument, "CommWindowRegister : the ranks register memories of different sizes");
    communicator->add_window(address, bytes);
    *window = buffer;
    return kSuccess;
  });
}
// For tests: how many operations read memory of a window, and how many memories of ncclMemAlloc there are.
NCCL_API int stand_in_windowed_operations() { return windowed_operations; }
NCCL_API int stand_in_memories() {
  const std::lock_guard lock(memories_mutex);
  return static_cast<int>(memories.size());
}

NCCL_API Status ncclRedOpCreatePreMulSum(int* reduction, const void* factor, int type, int residence, Comm comm) {
  return guarded([&] {
    auto& factors = ready(comm, "RedOpCreatePreMulSum")->factors;
    const bool is_valid = type >= 0 && type < kReducedTypes && factor != nullptr;
    require(is_valid, kInvalidArgument, "RedOpCreatePreMulSum : invalid scalar");
    Operation operation{.header = {.type = type}};
    const auto* bytes = static_cast<const std::byte*>(factor);
    require(residence == 1, kInvalidArgument, "RedOpCreatePreMulSum : the scalar is on the host, in the stand-in");
    operation.factor.assign(bytes, bytes + size_of(type));
    for (*reduction = kPreMulSum; factors.count(*reduction) > 0;) ++*reduction;
    factors[*reduction] = operation;
    return kSuccess;
  });
}
NCCL_API Status ncclRedOpDestroy(int reduction, Comm comm) {
  return guarded([&] {
    const bool was_known = find(comm, "RedOpDestroy")->factors.erase(reduction) > 0;
    require(was_known, kInvalidArgument, "RedOpDestroy : operator ", reduction, " unknown to this communicator");
    return kSuccess;
  });
}

// Operations: the kind, type, reduction, root or peer, and count, then the buffers

using In = const void*;
using Out = void*;

NCCL_API Status ncclAllReduce(In send, Out receive, size_t count, int type, int reduction, Comm comm, Stream stream) {
  return add_operation({{Kind::kAllReduce, type, reduction, 0, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclBroadcast(In send, Out receive, size_t count, int type, int root, Comm comm, Stream stream) {
  return add_operation({{Kind::kBroadcast, type, 0, root, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclReduce(In send, Out receive, size_t count, int type, int reduction, int root, Comm comm,
                           Stream stream) {
  return add_operation({{Kind::kReduce, type, reduction, root, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclAllGather(In send, Out receive, size_t count, int type, Comm comm, Stream stream) {
  return add_operation({{Kind::kAllGather, type, 0, 0, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclReduceScatter(In send, Out receive, size_t count, int type, int reduction, Comm comm,
                                  Stream stream) {
  return add_operation({{Kind::kReduceScatter, type, reduction, 0, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclSend(In send, size_t count, int type, int peer, Comm comm, Stream stream) {
  return add_operation({{Kind::kSend, type, 0, peer, count}, send}, comm, stream);
}
NCCL_API Status ncclRecv(Out receive, size_t count, int type, int peer, Comm comm, Stream stream) {
  return add_operation({{Kind::kRecv, type, 0, peer, count}, nullptr, receive}, comm, stream);
}
