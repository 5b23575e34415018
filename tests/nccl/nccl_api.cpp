// A stand-in libnccl.so.2: NCCL's functions for the ranks of one host, on the streams of the stand-in libcuda.so.1.
//
// As in NCCL, a call on a non-blocking communicator returns ncclInProgress and a thread enqueues the operation later,
// after PROCGROUP_STAND_IN_NCCL_DELAY_US microseconds (1000): until ncclCommGetAsyncError returns ncclSuccess, an event
// that is recorded on the stream precedes the operation.
//
// Stricter than NCCL: pointers are always checked, each collective compares the calls of all ranks and ends once all
// ranks are in it, a send ends when it is received, and a handle that was destroyed is known to be so. Not there:
// ncclCommInitAll, Grow, Suspend, one-sided operations, properties, and a configuration per operation.
//
// PROCGROUP_STAND_IN_NCCL_FAIL="allreduce:3:system,init:1:hang" lets the third AllReduce of this process fail, once
// its stream comes to it, and the first init never end. Names are NCCL's functions', in small letters. Kinds: cuda,
// system, internal, argument, usage, remote, timeout: the error that ncclCommGetAsyncError then returns; hang: no
// error and no end; with "call-" in front, as in call-system, the call itself returns the error.
// PROCGROUP_STAND_IN_NCCL_VERSION is what ncclGetVersion returns, 22807 if it is not set.
//
// As unforgiving as NCCL, where its documentation says little:
// - A non-blocking communicator of two or more ranks is for one thread at a time. Where two threads find a job done at
//   once, or one asks for the state while another launches, both join the job's thread: "NCCL WARN Thread join failed:
//   No such process" on stderr, and the communicator is in progress until it is aborted.
// - The first collective on a blocking communicator blocks the host until all ranks are in theirs, or until an abort.
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

bool is_blocking(const Config* config, bool otherwise) {
  if (config == nullptr) return otherwise;
  require(config->magic == kConfigMagic, kInvalidArgument, "ncclConfig_t argument not initialized");
  return config->blocking != 0;  // not set is INT_MIN
}

// Run a job on a communicator: now, or in a thread where it does not block.
Status run_job(const std::shared_ptr<Communicator>& communicator, std::function<Status()> job) {
  communicator->start(std::move(job));
  return communicator->is_blocking ? communicator->join() : kInProgress;
}

Status end_as_requested(Communicator& communicator, Status failure) {
  require(failure == kInProgress, failure, "failed on request");
  communicator.hang();
  return kInternalError;
}

Status init(Comm* comm, const std::string& id, int size, int rank, bool blocks) {
  require(size > 0, kInvalidArgument, "invalid device count (", size, ") requested");
  require(rank >= 0 && rank < size, kInvalidArgument, "rank ", rank, " exceeds ndev=", size);
  auto communicator = std::make_shared<Communicator>(id, rank, size, current_device(), blocks);
  communicator->start([communicator = communicator.get(), failure = requested_failure("init")] {
    return failure ? end_as_requested(*communicator, *failure) : communicator->connect();
  });
  *comm = publish(communicator);
  const auto status = add_init(communicator);
  const bool has_failed = status != kSuccess && status != kInProgress;
  if (has_failed) take(std::exchange(*comm, nullptr), "CommInitRank");
  return status;
}

// Make a child of the ranks that are `members`, in this order. Its id follows from its parent's and from the name of
// the group of ranks, so that they agree without a message.
Status make_child(Communicator& parent, const std::string& name, const std::vector<int>& members, bool blocks,
                  Comm* child) {
  const int rank = std::find(members.begin(), members.end(), parent.rank) - members.begin();
  const int size = static_cast<int>(members.size());
  if (rank == size) return kSuccess;
  const auto id = std::hash<std::string>()(text(parent.id, "/", name, "/", parent.child_counts[name]++));
  auto communicator = std::make_shared<Communicator>(text(kIdPrefix, std::hex, id), rank, size, parent.device, blocks);
  const auto status = parent.connect_child(communicator);
  if (status == kSuccess) *child = publish(communicator);
  return status;
}

struct Choice {
  int color;
  int key;
  int rank;
  int split_count;
};

Status split(Communicator& parent, int color, int key, bool blocks, Comm* child) {
  const Choice own{color, key, parent.rank, parent.split_count++};
  const auto* bytes = reinterpret_cast<const std::byte*>(&own);
  const auto all = parent.gather(Bytes(bytes, bytes + sizeof(own)));
  if (!all) return kInternalError;
  std::vector<Choice> choices(all->size());
  for (size_t rank = 0; rank < choices.size(); ++rank) std::memcpy(&choices[rank], (*all)[rank].data(), sizeof(Choice));
  std::erase_if(choices, [&](auto& choice) { return choice.color != color || color < 0; });
  std::stable_sort(choices.begin(), choices.end(), [](auto& left, auto& right) { return left.key < right.key; });
  std::vector<int> members;
  for (auto& choice : choices) members.push_back(choice.rank);
  return make_child(parent, text("split-", own.split_count, "-", color), members, blocks, child);
}

Status shrink(Communicator& parent, const std::vector<int>& excluded, bool blocks, Comm* child) {
  std::vector<int> members;
  std::string name = "shrink";
  for (int rank = 0; rank < parent.size; ++rank) {
    if (std::find(excluded.begin(), excluded.end(), rank) != excluded.end()) continue;
    members.push_back(rank);
    name += text("-", rank);
  }
  return make_child(parent, name, members, blocks, child);
}

Status finalize(const std::shared_ptr<Communicator>& communicator) {
  communicator->is_finalized = true;
  return run_job(communicator, [communicator = communicator.get()] {
    return communicator->flush() && communicator->gather({}) ? kSuccess : kInternalError;
  });
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

NCCL_API Status ncclCommInitRankScalable(Comm* comm, int size, int rank, int id_count, UniqueId* ids, Config* config) {
  return guarded([&] {
    require(comm != nullptr && ids != nullptr && id_count > 0, kInvalidArgument, "CommInitRank : argument is NULL");
    return init(comm, id_of(ids[0]), size, rank, is_blocking(config, true));
  });
}
NCCL_API Status ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  return ncclCommInitRankScalable(comm, size, rank, 1, &id, config);
}
NCCL_API Status ncclCommInitRank(Comm* comm, int size, UniqueId id, int rank) {
  return ncclCommInitRankScalable(comm, size, rank, 1, &id, nullptr);
}

NCCL_API Status ncclCommGetAsyncError(Comm comm, Status* status) {
  return guarded([&] {
    auto communicator = find(comm, "CommGetAsyncError");
    require_none_in_group(communicator, "CommGetAsyncError");
    return give(status, communicator->poll());
  });
}
NCCL_API Status ncclCommCount(Comm comm, int* count) {
  return guarded([&] { return give(count, int{ready(comm, "CommCount")->size}); });
}
NCCL_API Status ncclCommCuDevice(Comm comm, int* device) {
  return guarded([&] { return give(device, int{ready(comm, "CommCuDevice")->device}); });
}
NCCL_API Status ncclCommUserRank(Comm comm, int* rank) {
  return guarded([&] { return give(rank, int{ready(comm, "CommUserRank")->rank}); });
}

NCCL_API Status ncclCommFinalize(Comm comm) {
  return guarded([&] {
    require_none_in_group(find(comm, "CommFinalize"), "CommFinalize");
    auto communicator = ready(comm, "CommFinalize");
    const bool is_late = communicator->is_revoked() || communicator->is_finalized;
    require(!is_late, kInvalidUsage, "CommFinalize : the communicator was revoked or finalized");
    return finalize(communicator);
  });
}
// A communicator that failed ends at once; otherwise all ranks must call it, if they have not finalized before.
NCCL_API Status ncclCommDestroy(Comm comm) {
  return guarded([&] {
    auto communicator = find(comm, "CommDestroy");
    require_none_in_group(communicator, "CommDestroy");
    if (communicator->poll() == kInProgress) ready(comm, "CommDestroy");
    const bool is_usable = communicator->state() == kSuccess && !communicator->is_revoked();
    if (is_usable && !communicator->is_finalized) finalize(communicator);
    communicator->join();
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
NCCL_API Status ncclCommRevoke(Comm comm, int flags) {
  return guarded([&] {
    require(flags == 0, kInvalidArgument, "CommRevoke : flags must be 0");
    find(comm, "CommRevoke")->revoke();
    return kSuccess;
  });
}

NCCL_API Status ncclCommSplit(Comm comm, int color, int key, Comm* child, Config* config) {
  return guarded([&] {
    auto parent = ready(comm, "CommSplit");
    require(!is_in_group(), kInvalidUsage, "CommSplit : not in a group, in the stand-in");
    const bool blocks = is_blocking(config, parent->is_blocking);
    *child = nullptr;
    return run_job(parent, [=, parent = parent.get(), failure = requested_failure("split")] {
      return failure ? end_as_requested(*parent, *failure) : split(*parent, color, key, blocks, child);
    });
  });
}
NCCL_API Status ncclCommShrink(Comm comm, int* excluded, int count, Comm* child, Config* config, int flags) {
  return guarded([&] {
    auto parent = flags == 0 ? ready(comm, "CommShrink") : find(comm, "CommShrink");
    const std::vector<int> ranks(excluded, excluded + count);
    const bool is_member = std::find(ranks.begin(), ranks.end(), parent->rank) == ranks.end();
    require(!ranks.empty() && is_member, kInvalidArgument, "CommShrink : rank ", parent->rank, " is excluded, or none");
    require(!is_in_group(), kInvalidUsage, "CommShrink : not in a group, in the stand-in");
    if (flags != 0) parent->revoke();
    const bool blocks = is_blocking(config, parent->is_blocking);
    *child = nullptr;
    return run_job(parent, [=, parent = parent.get()] { return shrink(*parent, ranks, blocks, child); });
  });
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
// Registration has no effect.
NCCL_API Status ncclCommRegister(Comm, void* buffer, size_t, void** handle) { return give(handle, buffer); }
NCCL_API Status ncclCommDeregister(Comm, void*) { return kSuccess; }

NCCL_API Status ncclRedOpCreatePreMulSum(int* reduction, const void* factor, int type, int residence, Comm comm) {
  return guarded([&] {
    auto& factors = ready(comm, "RedOpCreatePreMulSum")->factors;
    const bool is_valid = type >= 0 && type < kReducedTypes && factor != nullptr;
    require(is_valid, kInvalidArgument, "RedOpCreatePreMulSum : invalid scalar");
    Operation operation{.header = {.type = type}};
    const auto* bytes = static_cast<const std::byte*>(factor);
    const bool is_on_device = residence == 0;
    if (is_on_device) operation.factor_address = factor;
    if (!is_on_device) operation.factor.assign(bytes, bytes + size_of(type));
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
NCCL_API Status ncclAlltoAll(In send, Out receive, size_t count, int type, Comm comm, Stream stream) {
  return add_operation({{Kind::kAlltoAll, type, 0, 0, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclGather(In send, Out receive, size_t count, int type, int root, Comm comm, Stream stream) {
  return add_operation({{Kind::kGather, type, 0, root, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclScatter(In send, Out receive, size_t count, int type, int root, Comm comm, Stream stream) {
  return add_operation({{Kind::kScatter, type, 0, root, count}, send, receive}, comm, stream);
}
NCCL_API Status ncclSend(In send, size_t count, int type, int peer, Comm comm, Stream stream) {
  return add_operation({{Kind::kSend, type, 0, peer, count}, send}, comm, stream);
}
NCCL_API Status ncclRecv(Out receive, size_t count, int type, int peer, Comm comm, Stream stream) {
  return add_operation({{Kind::kRecv, type, 0, peer, count}, nullptr, receive}, comm, stream);
}
