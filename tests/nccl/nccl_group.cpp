#include "nccl_group.hpp"

#include <algorithm>
#include <cstdlib>
#include <unordered_map>
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
int cuStreamIsCapturing(void* stream, int* status);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
}
std::shared_ptr<stand_in::Allocation> stand_in_find_memory(const void* address);
void stand_in_free(const std::function<void()>& free);
bool stand_in_capture(void* stream, const stand_in::Graph::Make& make);

namespace stand_in::nccl {
namespace {

struct Process {
  std::mutex mutex;
  std::unordered_map<Comm, std::shared_ptr<Communicator>> communicators;
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
  std::vector<Batch> batches{};
  std::vector<std::shared_ptr<Communicator>> aborts{};
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

// Into a graph, where the first stream is in a capture: numbered at each launch. After an abort it leaves at once.
bool capture(const Batch& batch) {
  int status = 0;
  if (cuStreamIsCapturing(batch.streams[0], &status) != 0 || status == 0) return false;
  return stand_in_capture(
      batch.streams[0], [batch, kept = batch.communicator->keep_for_graph()]() -> std::function<void()> {
        uint64_t number = 0;
        try {
          number = batch.communicator->issue();
        } catch (const Refused&) {
          return [] {};
        }
        return [batch, number] { batch.communicator->run(number, batch.operations); };
      });
}

// The batch runs on its first stream; the others wait for it, and it waits for them.
void launch(Batch batch) {
  auto run = [](void* argument) {
    std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
    batch->communicator->run(batch->number, batch->operations);
  };
  const OnDevice on_device(batch.communicator->device);
  const auto communicator = batch.communicator;
  const auto streams = batch.streams;
  for (auto stream : streams) {
    if (stream != streams[0]) join(streams[0], stream);
  }
  if (capture(batch)) {
    for (auto stream : streams) {
      if (stream != streams[0]) join(stream, streams[0]);
    }
    return;
  }
  batch.number = communicator->issue();
  auto argument = std::make_unique<Batch>(std::move(batch));
  const int result = cuLaunchHostFunc(streams[0], run, argument.get());
  if (result != 0) communicator->withdraw();
  require(result == 0, kUnhandledCudaError, "Cuda failure ", result, " on stream ", streams[0]);
  argument.release();  // NOLINT: the stream has it
  for (auto stream : streams) {
    if (stream != streams[0]) join(stream, streams[0]);
  }
}

bool has_collective(const Batch& batch) {
  const auto is_collective = [](auto& operation) { return operation.header.kind < Kind::kSend; };
  return std::any_of(batch.operations.begin(), batch.operations.end(), is_collective);
}

// NCCL drops a collective of nothing, and so need not connect for it.
bool needs_ranks(const Batch& batch) {
  const auto moves = [](auto& operation) { return operation.header.kind < Kind::kSend && operation.header.count > 0; };
  return std::any_of(batch.operations.begin(), batch.operations.end(), moves);
}

Status end_unless_started() { return group.depth > 0 ? kSuccess : end_group(); }

// The buffer is one of a call: AllReduce, sendbuff.
void check_pointer(const Communicator& communicator, const void* pointer, size_t bytes, Kind kind, const char* buffer) {
  if (bytes == 0) return;
  const auto allocation = stand_in_find_memory(pointer);
  const auto* call = name_of(kind);
  require(allocation != nullptr, kInvalidArgument, call, " : ", buffer, " ", pointer, " is not a valid pointer");
  require(allocation->contains(reinterpret_cast<uintptr_t>(pointer), bytes), kInvalidArgument, call, " : ", buffer, " ",
          pointer, " has not the ", bytes, " bytes of the call");
  require(allocation->is_pinned_host || allocation->device == communicator.device, kInvalidArgument, call, " : ",
          buffer, " allocated on device ", allocation->device, " mismatchs with NCCL device ", communicator.device);
}

void check(const Communicator& communicator, const Operation& operation) {
  const auto& header = operation.header;
  const auto* call = name_of(header.kind);
  require(header.root >= 0 && header.root < communicator.size, kInvalidArgument, call, " : invalid root ", header.root,
          " (root should be in the 0..", communicator.size, " range)");
  require(header.type >= 0 && header.type < kTypes, kInvalidArgument, call, " : invalid type ", header.type);
  const auto bytes = header.count * size_of(header.type);
  if (header.kind != Kind::kRecv && sends(header, communicator.rank, header.root)) {
    const auto blocks = header.kind == Kind::kReduceScatter ? communicator.size : 1;
    check_pointer(communicator, operation.send, bytes * blocks, header.kind, "sendbuff");
  }
  if (receives(header, communicator.rank)) {
    const auto blocks = header.kind == Kind::kAllGather ? communicator.size : 1;
    check_pointer(communicator, operation.receive, bytes * blocks, header.kind, "recvbuff");
  }
}

// Check the reduction; that of a PreMulSum is replaced by its factor.
void resolve_reduction(const Communicator& communicator, Operation& operation) {
  auto& header = operation.header;
  const auto* call = name_of(header.kind);
  require(header.type < kReducedTypes, kInvalidArgument, call, " : float8 is not reduced by the stand-in");
  if (header.reduction >= 0 && header.reduction < kPreMulSum) return;
  const auto found = communicator.factors.find(header.reduction);
  require(found != communicator.factors.end() && found->second.header.type == header.type, kInvalidArgument, call,
          " : reduction operation ", header.reduction, " unknown to this communicator, or of another type");
  operation.factor = found->second.factor;
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

Status refuse(const Refused& refused) {
  set_last_error(refused.reason);
  if (group.depth > 0 && group.error == kSuccess) group.error = refused.status;
  return refused.status;
}

std::optional<Status> requested_failure(const char* function) {
  constexpr const char* kKinds[] = {"", "cuda", "system", "internal", "argument", "usage", "remote", "hang", "timeout"};
  static const char* requests = std::getenv("PROCGROUP_STAND_IN_NCCL_FAIL");
  if (requests == nullptr) return std::nullopt;
  const auto call = in_small_letters(function);
  const auto number = [&] {
    std::lock_guard lock(process().mutex);
    return ++process().calls[call];
  }();
  std::istringstream stream(requests);
  const auto prefix = text(call, ":", number, ":");
  for (std::string request; std::getline(stream, request, ',');) {
    if (request.rfind(prefix, 0) != 0) continue;
    auto kind = request.substr(prefix.size());
    const bool is_of_call = kind.rfind("call-", 0) == 0;
    if (is_of_call) kind.erase(0, 5);
    const auto status = static_cast<Status>(std::find(std::begin(kKinds), std::end(kKinds), kind) - std::begin(kKinds));
    require(!is_of_call, status, call, " failed on request");
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

namespace {

[[noreturn]] void refuse_unknown(Comm comm, const char* call) {
  throw Refused{kInvalidArgument, text(call, " : comm ", comm, " was destroyed or aborted, or never was one")};
}

}  // namespace

std::shared_ptr<Communicator> take(Comm comm, const char* call) {
  std::lock_guard lock(process().mutex);
  const auto found = process().communicators.extract(comm);
  if (found.empty()) refuse_unknown(comm, call);
  return found.mapped();
}

std::shared_ptr<Communicator> find(Comm comm, const char* call) {
  std::lock_guard lock(process().mutex);
  const auto found = process().communicators.find(comm);
  if (found == process().communicators.end()) refuse_unknown(comm, call);
  return found->second;
}

std::shared_ptr<Communicator> ready(Comm comm, const char* call) {
  auto communicator = find(comm, call);
  const auto state = communicator->state();
  require(state == kSuccess, state, call, " : the communicator failed before");
  return communicator;
}

void start_group() { ++group.depth; }

bool is_in_group() { return group.depth > 0; }

void require_none_in_group(const std::shared_ptr<Communicator>& communicator, const char* call) {
  const auto& batches = group.batches;
  const bool is_there =
      std::any_of(batches.begin(), batches.end(), [&](auto& batch) { return batch.communicator == communicator; });
  require(!is_there, kInvalidUsage, call, " : the communicator has operations in the open group of this thread");
}

Status end_group() {
  if (group.depth > 0 && --group.depth > 0) return kSuccess;
  auto ended = std::exchange(group, {});
  if (!ended.aborts.empty()) {
    stand_in_free([&] {
      for (auto& communicator : ended.aborts) communicator->wait_for_device();
    });
  }
  if (ended.error != kSuccess) return ended.error;
  // All first, and then the waits: so two ranks may have the communicators of a group in different orders.
  for (auto& batch : ended.batches) {
    if (has_collective(batch)) batch.communicator->announce_collective();
  }
  for (auto& batch : ended.batches) {
    const bool is_ready = !needs_ranks(batch) || batch.communicator->wait_for_collectives();
    require(is_ready, kInternalError, "the communicator was aborted");
    launch(std::move(batch));
  }
  return kSuccess;
}

Status add_abort(const std::shared_ptr<Communicator>& communicator) {
  communicator->abort();
  std::erase_if(group.batches, [&](auto& batch) { return batch.communicator == communicator; });
  group.aborts.push_back(communicator);
  return end_unless_started();
}

std::atomic<int> windowed_operations = 0;

Status add_operation(Operation operation, Comm comm, Stream stream) {
  return guarded([&] {
    const char* call = name_of(operation.header.kind);
    const auto communicator = find(comm, call);
    ready(comm, call);
    require(!communicator->is_finalized, kInvalidUsage, call, " : the communicator was finalized");
    check(*communicator, operation);
    if (is_reduction(operation.header.kind)) resolve_reduction(*communicator, operation);
    if (communicator->is_in_window(operation.send)) ++windowed_operations;
    operation.failure = requested_failure(call);
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
