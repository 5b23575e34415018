#include "nccl_group.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cuda_device.hpp"

extern "C" {
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy(void* event);
int cuEventRecord(void* event, void* stream);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
}
std::shared_ptr<stand_in::Allocation> stand_in_find_memory(const void* address);

namespace stand_in::nccl {
namespace {

struct Process {
  std::mutex mutex;
  std::map<Comm, std::shared_ptr<Communicator>> communicators;
  std::map<std::string, int> calls;
  std::string last_error;
  uintptr_t next_handle = 0x4e43434c0000;
};

// Never destroyed: threads run while the process ends.
Process& process() {
  static Process* process = new Process;
  return *process;
}

struct Batch {
  std::shared_ptr<Communicator> communicator;
  uint64_t number = 0;
  std::vector<Operation> operations{};
  std::vector<Stream> streams{};
};

struct Group {
  int depth = 0;
  Status error = kSuccess;
  std::optional<bool> is_blocking{};
  std::vector<std::shared_ptr<Communicator>> inits{};
  std::vector<Batch> batches{};
};
thread_local Group group;

// The device of a communicator as the thread's current one, also where another thread called.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    void* context;
    cuCtxGetCurrent(&before_);
    cuDevicePrimaryCtxRetain(&context, device);
    cuCtxSetCurrent(context);
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cuCtxSetCurrent(before_); }

 private:
  void* before_;
};

void join(Stream waiting, Stream first) {
  void* event;
  cuEventCreate(&event, 0);
  cuEventRecord(event, first);
  cuStreamWaitEvent(waiting, event, 0);
  cuEventDestroy(event);
}

// The batch runs on its first stream; the others wait for it, and it waits for them.
void launch(Batch batch) {
  auto run = [](void* argument) {
    std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
    batch->communicator->run(batch->number, batch->operations);
  };
  const OnDevice on_device(batch.communicator->device);
  const auto streams = batch.streams;
  for (auto stream : streams) {
    if (stream != streams[0]) join(streams[0], stream);
  }
  batch.number = batch.communicator->issue();
  const int result = cuLaunchHostFunc(streams[0], run, new Batch(std::move(batch)));
  require(result == 0, kUnhandledCudaError, text("Cuda failure ", result, " on stream ", streams[0]));
  for (auto stream : streams) {
    if (stream != streams[0]) join(stream, streams[0]);
  }
}

Status launch_or_start(Batch batch) {
  auto communicator = batch.communicator;
  if (communicator->is_blocking) return launch(std::move(batch)), kSuccess;
  communicator->start([batch = std::move(batch)] {
    const auto delay = number_from_environment("PROCGROUP_STAND_IN_NCCL_DELAY_US", 1000);
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    launch(batch);
    return kSuccess;
  });
  return kInProgress;
}

Status end_unless_started() { return group.depth > 0 ? kSuccess : end_group(); }

void require_one_mode(bool is_blocking) {
  require(group.is_blocking.value_or(is_blocking) == is_blocking, kInvalidArgument,
          "Blocking and nonblocking communicators are not allowed in the same group.");
  if (group.depth > 0) group.is_blocking = is_blocking;
}

void check_pointer(const Communicator& communicator, const void* pointer, size_t bytes, const std::string& name) {
  if (bytes == 0) return;
  const auto allocation = stand_in_find_memory(pointer);
  require(allocation != nullptr, kInvalidArgument, text(name, " ", pointer, " is not a valid pointer"));
  require(allocation->contains(reinterpret_cast<uintptr_t>(pointer), bytes), kInvalidArgument,
          text(name, " ", pointer, " has not the ", bytes, " bytes of the call"));
  require(allocation->is_pinned_host || allocation->device == communicator.device, kInvalidArgument,
          text(name, " allocated on device ", allocation->device, " mismatchs with NCCL device ", communicator.device));
}

void check(const Communicator& communicator, const Operation& operation) {
  const auto& header = operation.header;
  const auto call = text(name_of(header.kind), " : ");
  require(header.root >= 0 && header.root < communicator.size, kInvalidArgument,
          text(call, "invalid root ", header.root, " (root should be in the 0..", communicator.size, " range)"));
  require(header.type >= 0 && header.type < kTypes, kInvalidArgument, text(call, "invalid type ", header.type));
  const auto bytes = header.count * size_of(header.type);
  if (header.kind != Kind::kRecv && sends(header, communicator.rank, header.root)) {
    const auto blocks = has_block_for_each(header.kind) ? communicator.size : 1;
    check_pointer(communicator, operation.send, bytes * blocks, call + "sendbuff");
  }
  const bool is_to_root = header.kind == Kind::kReduce || header.kind == Kind::kGather;
  if (header.kind != Kind::kSend && (!is_to_root || communicator.rank == header.root)) {
    const auto blocks = has_block_from_each(header.kind) ? communicator.size : 1;
    check_pointer(communicator, operation.receive, bytes * blocks, call + "recvbuff");
  }
}

// Check the reduction; that of a PreMulSum is replaced by its factor.
void resolve_reduction(const Communicator& communicator, Operation& operation) {
  auto& header = operation.header;
  const auto call = text(name_of(header.kind), " : ");
  require(header.type < kReducedTypes, kInvalidArgument, call + "float8 is not reduced by the stand-in");
  if (header.reduction >= 0 && header.reduction < kPreMulSum) return;
  const auto found = communicator.factors.find(header.reduction);
  require(found != communicator.factors.end() && found->second.header.type == header.type, kInvalidArgument,
          text(call, "reduction operation ", header.reduction, " unknown to this communicator, or of another type"));
  operation.factor = found->second.factor;
  operation.factor_address = found->second.factor_address;
  header.reduction = kPreMulSum;
}

std::string in_small_letters(std::string name) {
  for (auto& letter : name) letter = static_cast<char>(std::tolower(letter));
  return name;
}

}  // namespace

void set_last_error(const std::string& reason) {
  std::lock_guard lock(process().mutex);
  process().last_error = reason;
}

std::string last_error() {
  std::lock_guard lock(process().mutex);
  return process().last_error;
}

void require(bool condition, Status status, const std::string& reason) {
  if (!condition) throw Refused{status, reason};
}

Status guarded(const std::function<Status()>& body) {
  try {
    return body();
  } catch (const Refused& refused) {
    set_last_error(refused.reason);
    if (group.depth > 0 && group.error == kSuccess) group.error = refused.status;
    return refused.status;
  }
}

std::optional<Status> requested_failure(const std::string& call) {
  constexpr const char* kKinds[] = {"", "cuda", "system", "internal", "argument", "usage", "remote", "hang", "timeout"};
  const auto number = [&] {
    std::lock_guard lock(process().mutex);
    return ++process().calls[call];
  }();
  const char* requests = std::getenv("PROCGROUP_STAND_IN_NCCL_FAIL");
  std::istringstream stream(requests != nullptr ? requests : "");
  const auto prefix = text(call, ":", number, ":");
  for (std::string request; std::getline(stream, request, ',');) {
    if (request.rfind(prefix, 0) != 0) continue;
    auto kind = request.substr(prefix.size());
    const bool is_of_call = kind.rfind("call-", 0) == 0;
    if (is_of_call) kind.erase(0, 5);
    const auto status = static_cast<Status>(std::find(std::begin(kKinds), std::end(kKinds), kind) - std::begin(kKinds));
    require(!is_of_call, status, text(call, " failed on request"));
    return status;
  }
  return std::nullopt;
}

Comm publish(const std::shared_ptr<Communicator>& communicator) {
  std::lock_guard lock(process().mutex);
  auto handle = reinterpret_cast<Comm>(process().next_handle += 16);
  process().communicators[handle] = communicator;
  return handle;
}

void forget(Comm comm) {
  std::lock_guard lock(process().mutex);
  process().communicators.erase(comm);
}

std::shared_ptr<Communicator> find(Comm comm, const char* call) {
  std::lock_guard lock(process().mutex);
  const auto found = process().communicators.find(comm);
  if (found != process().communicators.end()) return found->second;
  throw Refused{kInvalidArgument, text(call, " : comm ", comm, " was destroyed or aborted, or never was one")};
}

std::shared_ptr<Communicator> ready(Comm comm, const char* call) {
  auto communicator = find(comm, call);
  const auto state = communicator->state();
  require(state != kInProgress, kInvalidArgument,
          text(call, " : Attempt to use communicator before the previous operation returned ncclSuccess"));
  require(state == kSuccess, state, text(call, " : the communicator failed before"));
  return communicator;
}

void start_group() { ++group.depth; }

bool is_in_group() { return group.depth > 0; }

Status end_group() {
  if (group.depth > 0 && --group.depth > 0) return kSuccess;
  const auto ended = std::exchange(group, {});
  Status status = ended.error;
  if (status != kSuccess) return status;
  for (auto& init : ended.inits) {
    const auto result = init->is_blocking ? init->join() : kInProgress;
    if (status == kSuccess) status = result;
  }
  for (auto& batch : ended.batches) status = launch_or_start(batch);
  return status;
}

Status add_init(const std::shared_ptr<Communicator>& communicator) {
  require(group.batches.empty(), kInvalidUsage, "CommInitRank : not in one group with operations");
  require_one_mode(communicator->is_blocking);
  group.inits.push_back(communicator);
  return end_unless_started();
}

Status add_operation(Operation operation, Comm comm, Stream stream) {
  return guarded([&] {
    const char* call = name_of(operation.header.kind);
    const auto communicator = ready(comm, call);
    require(!communicator->is_finalized, kInvalidUsage, text(call, " : the communicator was finalized"));
    require(!communicator->is_revoked(), kInvalidUsage, text(call, " : the communicator was revoked"));
    require(group.inits.empty(), kInvalidUsage, text(call, " : not in one group with ncclCommInitRank"));
    require_one_mode(communicator->is_blocking);
    check(*communicator, operation);
    if (is_reduction(operation.header.kind)) resolve_reduction(*communicator, operation);
    operation.failure = requested_failure(in_small_letters(call));
    auto& batches = group.batches;
    auto batch =
        std::find_if(batches.begin(), batches.end(), [&](auto& entry) { return entry.communicator == communicator; });
    if (batch == batches.end()) batch = batches.insert(batch, Batch{communicator});
    batch->operations.push_back(std::move(operation));
    batch->streams.push_back(stream);
    return end_unless_started();
  });
}

}  // namespace stand_in::nccl
