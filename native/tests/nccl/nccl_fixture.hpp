// Groups whose calls NCCL moves, with the stand-ins of libcuda and libnccl (tests/nccl): ranks are threads of this
// process, and each has a GPU of its own.
//
// Calls are issued as bindings/issue.cpp issues them. Communicators are made natively: the first of their ranks makes
// the id, and the others find it in memory.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group/group_operation.hpp"
#include "nccl/nccl_task.hpp"
#include "tests/engine_fixture.hpp"

extern "C" {
int cuMemAlloc(uintptr_t* address, size_t bytes);
int cuMemFree(uintptr_t address);
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream);
int cuStreamSynchronize(void* stream);
int cuCtxSynchronize();
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
}

namespace procgroup {

inline constexpr double kLong = 100;  // seconds; the program's own limit comes first

// To be called first in main().
inline void use_stand_ins(int gpus = 4) { setenv("PROCGROUP_STAND_IN_GPUS", std::to_string(gpus).c_str(), 0); }

inline void require(int result, const char* what) {
  if (result == 0) return;
  std::fprintf(stderr, "\n%s returned %d\n", what, result);
  std::abort();
}

// An array of a rank's GPU, and a stream on which it is used. Both are for one thread at a time.
class DeviceArray {
 public:
  DeviceArray(Gpu& gpu, CudaStream stream, size_t count) : gpu_(gpu), stream_(stream), count_(count) {
    const OnGpu on_gpu(gpu_);
    require(cuMemAlloc(&address_, count * sizeof(int64_t)), "cuMemAlloc");
  }
  DeviceArray(DeviceArray&& other) noexcept
      : gpu_(other.gpu_), stream_(other.stream_), count_(other.count_), address_(std::exchange(other.address_, 0)) {}
  ~DeviceArray() {
    const OnGpu on_gpu(gpu_);
    cuMemFree(address_);
  }

  DeviceSpan span() const { return {address_, count_ * sizeof(int64_t)}; }
  DeviceSpan part(size_t first, size_t count) const {
    return {address_ + first * sizeof(int64_t), count * sizeof(int64_t)};
  }

  // Queue that the array gets these values; the host's memory is free at once.
  void write(const std::vector<int64_t>& values) {
    const OnGpu on_gpu(gpu_);
    require(
        cuMemcpyAsync(address_, reinterpret_cast<uintptr_t>(values.data()), values.size() * sizeof(int64_t), stream_),
        "cuMemcpyAsync");
  }
  // The values when the stream has come here.
  std::vector<int64_t> read() const {
    const OnGpu on_gpu(gpu_);
    std::vector<int64_t> values(count_);
    require(cuMemcpyAsync(reinterpret_cast<uintptr_t>(values.data()), address_, count_ * sizeof(int64_t), stream_),
            "cuMemcpyAsync");
    require(cuStreamSynchronize(stream_), "cuStreamSynchronize");
    return values;
  }

 private:
  Gpu& gpu_;
  CudaStream stream_;
  size_t count_;
  uintptr_t address_ = 0;
};

// The ids of communicators, by their ranks.
struct Meeting {
  std::mutex mutex;
  std::map<NcclBackend::Pair, NcclId> ids;
  std::set<int> absent;  // ranks that never come
};

// Makes a communicator, as backends/nccl.py does.
class ConnectTask final : public Task {
 public:
  ConnectTask(NcclBackend& backend, Meeting& meeting, NcclBackend::Pair ranks)
      : backend_(backend), meeting_(meeting), ranks_(ranks) {}

  static std::string config() {
    struct Config {  // the beginning of an ncclConfig_t
      size_t size = sizeof(Config);
      unsigned magic = 0xcafebeef;
      unsigned version = 22800;
      int blocking = 1;
      int unused = 0;
    } config;
    return {reinterpret_cast<const char*>(&config), sizeof config};
  }

  void start(int, uint64_t) override {}
  State test(std::vector<int>& awaited) override {
    awaited.clear();
    if (!made_ && !make()) return State::kPending;
    if (!made_->is_connected()) return State::kPending;
    backend_.set_communicator(ranks_, made_);
    return State::kCompleted;
  }

 private:
  bool make() {
    const bool is_for_all = ranks_ == NcclBackend::kAll;
    const int rank = is_for_all ? backend_.rank() : backend_.rank() == ranks_.second ? 1 : 0;
    NcclId id{};
    {
      const std::lock_guard lock(meeting_.mutex);
      if (meeting_.absent.contains(backend_.rank())) return false;
      const auto known = meeting_.ids.find(ranks_);
      if (known == meeting_.ids.end() && rank != 0) return false;
      if (known != meeting_.ids.end()) id = known->second;
      if (known == meeting_.ids.end()) {
        backend_.library()->require(backend_.library()->ncclGetUniqueId(&id));
        meeting_.ids[ranks_] = id;
      }
    }
    made_ = backend_.make_communicator(rank, is_for_all ? backend_.size() : 2, id, config());
    return true;
  }

  NcclBackend& backend_;
  Meeting& meeting_;
  const NcclBackend::Pair ranks_;
  std::shared_ptr<NcclCommunicator> made_;
};

// A call that was issued.
struct IssuedCall {
  std::shared_ptr<NcclTask> task;
  std::shared_ptr<GroupOperation> operation;

  // Wait for the call and for its work on the GPU; what has made one of them fail, or null.
  const Failure* wait() const {
    const auto end_of = [](GroupOperation& one) {
      while (!one.is_completed()) {
        one.help();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      return one.failure();
    };
    if (const Failure* failure = end_of(*operation)) return failure;
    return operation->device_work() ? end_of(*operation->device_work()) : nullptr;
  }
  void expect_success(int rank) const {
    const Failure* failure = wait();
    check(failure == nullptr, failure == nullptr ? "" : failure->summary().c_str(), rank);
  }
};

// What a rank does in a test: its group, its backend, and how it makes calls.
class NcclRank {
 public:
  NcclRank(Group& its_group, std::shared_ptr<NcclBackend> its_backend)
      : group(its_group), backend(std::move(its_backend)) {}

  Group& group;
  const std::shared_ptr<NcclBackend> backend;
  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  Gpu& gpu() const { return backend->gpu(); }

  CudaStream make_stream() const {
    const OnGpu on_gpu(gpu());
    return gpu().make_stream();
  }
  void synchronize(CudaStream stream) const {
    const OnGpu on_gpu(gpu());
    require(cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
  void destroy(CudaStream stream) const {
    const OnGpu on_gpu(gpu());
    gpu().destroy_stream(stream);
  }

  std::shared_ptr<NcclTask> task_for(NcclCall call, const std::vector<CudaStream>& streams, bool stays,
                                     std::shared_ptr<const void> owner = nullptr) const {
    return std::make_shared<NcclTask>(backend, std::move(call), streams, stays, std::move(owner));
  }

  // As PythonGroup::issue_to_nccl. Throws OperationFailed where the group has ended.
  IssuedCall issue(NcclCall call, const std::vector<CudaStream>& streams, bool stays = true, double seconds = kLong,
                   std::shared_ptr<const void> owner = nullptr) const {
    Request request = request_for(call);
    const auto task = task_for(std::move(call), streams, stays, std::move(owner));
    request.task = task;
    {
      const std::lock_guard issuing(backend->issuing());
      if (!task->copies_out() && backend->has_gate()) {
        task->take_gate();
        auto operation = group.calls().start(std::move(request), seconds);
        task->queue_behind_gate();
        return {task, operation};
      }
      task->queue_later();
    }
    NoRuntime language;
    return {task, group.calls().start(std::move(request), seconds, &language)};
  }

  // As PythonGroup::message with move_on_device.
  IssuedCall issue_message(OpKind op, DeviceSpan span, int peer, uint64_t tag, const std::vector<CudaStream>& streams,
                           double seconds = kLong) const {
    NcclCall call{op, Dtype::kInt64, ReduceOp::kSum, 1, peer, {}, {}};
    (op == OpKind::kSend ? call.inputs : call.outputs).push_back(span);
    MessageRequest request{op, reinterpret_cast<void*>(span.address), span.bytes / sizeof(int64_t), Dtype::kInt64, peer,
                           tag};
    const auto task = task_for(std::move(call), streams, false);
    request.task = task;
    request.external = request.on_device = true;
    return {task, group.messages().start(request, seconds)};
  }

  NcclCall all_reduce(const DeviceArray& array) const {
    return {OpKind::kAllReduce, Dtype::kInt64, ReduceOp::kSum, 1, -1, {array.span()}, {array.span()}};
  }

 private:
  static Request request_for(const NcclCall& call) {
    Request request;
    Descriptor& made = request.descriptor;
    made.op = call.op;
    made.dtype = call.dtype;
    made.reduce_op = call.reduce_op;
    made.root = call.root;
    made.external = made.on_device = true;
    const auto blocks_of = [](const std::vector<DeviceSpan>& spans) {
      std::vector<Block> blocks;
      for (const DeviceSpan& span : spans)
        blocks.push_back({reinterpret_cast<void*>(span.address), span.bytes / sizeof(int64_t)});
      return blocks;
    };
    if (call.op == OpKind::kAllToAll) {  // its sizes are compared by pair
      request.inputs = blocks_of(call.inputs);
      request.outputs = blocks_of(call.outputs);
      return request;
    }
    const std::vector<DeviceSpan>& spans = call.inputs.empty() ? call.outputs : call.inputs;
    made.count = spans[0].bytes / sizeof(int64_t);
    return request;
  }
};

// One group, and what its ranks have of NCCL. At its end the ranks leave in order, or after a failure.
class NcclWorld {
 public:
  explicit NcclWorld(int size, bool may_gate = true, const std::vector<int>& hosts = {}) {
    world_ = make_world(size, ReadingRanges::for_this_processor(), kTiny, hosts);
    const auto library = std::make_shared<const NcclLibrary>("");
    library_ = library;
    for (Rank& one : world_) {
      const int rank = one.group->rank();
      const auto backend = std::make_shared<NcclBackend>(rank, size, rank, may_gate);
      backend->on_first_call([library] { return library; });
      // The task holds no reference: the backend owns it.
      backend->on_connect([mine = backend.get(), this](NcclBackend::Pair ranks) {
        return std::make_shared<ConnectTask>(*mine, meeting, ranks);
      });
      backend->load();
      one.group->end().on_broken([backend] { backend->abort(); });
      backends_.push_back(backend);
    }
  }
  NcclWorld(const NcclWorld&) = delete;
  ~NcclWorld() { leave(); }

  Meeting meeting;
  std::weak_ptr<const NcclLibrary> library() const { return library_; }
  Group& group(int rank) { return *world_[static_cast<size_t>(rank)].group; }
  NcclBackend& backend(int rank) { return *backends_[static_cast<size_t>(rank)]; }

  void in_all_ranks(const std::function<void(NcclRank&)>& body) {
    procgroup::in_all_ranks(world_, [&](Group& mine) {
      NcclRank rank(mine, backends_[static_cast<size_t>(mine.rank())]);
      body(rank);
    });
  }

  // In a forked child: destroy the backends, without leaving.
  void let_go() {
    for (Rank& one : world_) one.group->end().on_broken({});
    backends_.clear();
  }

  // As ProcessGroup.shutdown.
  void leave() {
    if (std::exchange(has_left_, true)) return;
    procgroup::in_all_ranks(world_, [&](Group& mine) {
      const bool failed = mine.end().is_completed() || mine.members().has_lost_member();
      mine.leave();
      backend(mine.rank()).close(failed);
    });
  }

 private:
  std::weak_ptr<const NcclLibrary> library_;            // which all that NCCL has of this group refers to
  std::vector<std::shared_ptr<NcclBackend>> backends_;  // the groups refer to them
  std::vector<Rank> world_;
  bool has_left_ = false;
};

// Make the communicator of collectives: later calls can be queued behind gates.
inline void connect(NcclRank& mine, CudaStream stream) {
  DeviceArray array(mine.gpu(), stream, 1);
  array.write({1});
  mine.issue(mine.all_reduce(array), {stream}).expect_success(mine.rank());
  CHECK_EQUAL(array.read(), std::vector<int64_t>(1, mine.size()));
}

}  // namespace procgroup
