// What NCCL has of one group on this rank: its GPU, its communicators, its stream, and its gate.
//
//     caller's stream     kernels    wait for (gate n)   NCCL   (done)   kernels
//     engine              call n:    the ranks agree: open (gate n)
//
// A call is queued on a stream at once, behind its *gate*: the number up to which the ranks have agreed. The progress
// thread opens it, so no host waits for another rank, and hosts may be ahead of each other, and of their GPUs. Only the
// host opens gates, and those of a stream in order: so no wait stands before the work that would end it.
//
// Where streams cannot wait for words of memory, and before the communicator is made, a call is queued when the ranks
// have agreed. Each rank may do either: what NCCL gets is the same, in the same order.
//
// A failure of the group opens all gates, after the communicators have been told to abort: NCCL's work that stood
// behind a gate leaves when it has begun, and the streams run on.
//
// Collectives have one communicator; the messages from one rank to another have one of their own, which both ranks use
// in the order in which the receiver matches them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/gpu.hpp"
#include "nccl/nccl_communicator.hpp"
#include "ops/task.hpp"

namespace procgroup {

// Calls that one communicator makes one after the other. Guarded by the backend's mutex.
struct NcclQueue {
  std::shared_ptr<NcclCommunicator> communicator;  // null before it is connected
  std::shared_ptr<Task> connecting;                // makes the communicator
  CudaStream stream = nullptr;                     // made at the first use
  uint64_t next = 0;                               // the number of the next message
};

class NcclBackend : public std::enable_shared_from_this<NcclBackend> {  // as NcclLibrary
 public:
  // The ranks of a communicator by group rank, of all ranks or of the sender and the receiver of messages.
  using Pair = std::pair<int, int>;
  static constexpr Pair kAll{-1, -1};
  static constexpr Pair kCaptured{-2, -2};  // of a stream for what is captured: the others must not be in a capture
  // Returns the task that makes a communicator together with its other ranks, and gives it to set_communicator.
  using Connect = std::function<std::shared_ptr<Task>(Pair ranks)>;

  // Loads NCCL, and throws where that fails.
  using Load = std::function<std::shared_ptr<const NcclLibrary>()>;

  // `device` is the GPU's number, or -1 for that of the first call. Where it may not, no call has a gate. The group's
  // streams may have a high priority: the GPU then begins their work before that of other streams.
  NcclBackend(int rank, int size, int device, bool may_gate, bool has_high_priority = false);
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;
  ~NcclBackend();

  const std::shared_ptr<const NcclLibrary>& library() const { return library_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  bool supports(OpKind op, Dtype dtype, ReduceOp reduce_op) const;
  void on_first_call(Load load) { load_ = std::move(load); }
  void on_connect(Connect connect) { connect_ = std::move(connect); }

  void load();
  // Let the calls of this group use a GPU, after load(); false where they use another one.
  bool use(int device);
  // Why a call on arrays on this GPU is refused, which use() has returned false for.
  std::string refusal_of(OpKind op, int device) const;
  int device() const { return gpu_ == nullptr ? eager_device_ : gpu_.load()->number(); }
  bool is_eager() const { return eager_device_ >= 0; }
  // The parent of a forked child still uses what the child has a copy of, and mutexes may be held for ever.
  bool was_forked() const;
  Gpu& gpu() const { return *gpu_; }
  // The stream of a communicator's calls that do not stay on the caller's.
  CudaStream stream_of(Pair ranks);

  std::shared_ptr<NcclCommunicator> make_communicator(int rank, int size, const NcclId& id, std::string config);
  void set_communicator(Pair ranks, std::shared_ptr<NcclCommunicator> communicator);
  // The communicator for a call, if it can be used now: null while it is made, and before the turn of a message.
  // Throws std::runtime_error where it cannot be made.
  std::shared_ptr<NcclCommunicator> communicator_for(Pair ranks, uint64_t number);
  void finish_turn(Pair ranks);

  // Held to issue a call: to give it its place in the group's queue and on the stream.
  std::mutex& issuing() { return issuing_; }
  bool is_connected() const { return is_connected_; }
  // Whether calls can be queued behind gates now. With `issuing`, as the next two.
  bool has_gate();
  // The number of the gate of the next call.
  uint32_t next_gate() { return ++gates_ != 0 ? gates_ : ++gates_; }  // 0 is none
  // A call that is queued when the ranks have agreed; later ones cannot be queued before that.
  void add_ungated() { ++ungated_; }
  void remove_ungated() { --ungated_; }
  // Let a stream wait for the gate of a call.
  void let_wait(CudaStream stream, uint32_t gate);
  void open(uint32_t gate);

  // From the agreement on a call that is captured until that has been done: no later call is queued meanwhile.
  void set_capturing(bool is_capturing) { is_capturing_ = is_capturing; }
  bool is_capturing() const { return is_capturing_; }
  // What lives as long as a graph with calls of this group.
  void add_graph(std::weak_ptr<void> graph);

  // Keep what an array's memory belongs to as long as this backend.
  void keep(std::shared_ptr<const void> owner);

  // End all work on the GPU, because the group has failed. From any thread; does not wait.
  void abort();
  // Leave, in order or after a failure. Waits for some seconds at most.
  void close(bool failed);

 private:
  std::vector<std::shared_ptr<NcclCommunicator>> communicators();
  void drop_connecting();
  bool has_graphs();

  const int rank_;
  const int size_;
  const int eager_device_;
  const bool may_gate_;
  const bool has_high_priority_;
  const uint64_t generation_;
  std::atomic<Gpu*> gpu_{nullptr};  // null before the first call
  Load load_;
  Connect connect_;
  std::shared_ptr<const NcclLibrary> library_;
  std::mutex mutex_;  // guards what follows
  std::map<Pair, NcclQueue> queues_;
  std::vector<std::weak_ptr<NcclCommunicator>> made_;  // also those that are not connected yet
  std::vector<std::shared_ptr<const void>> kept_;
  std::vector<std::weak_ptr<void>> graphs_;
  bool is_aborted_ = false;
  std::shared_ptr<NcclCommunicator> communicator_;  // of collectives: once `is_connected_`, also without the mutex
  std::atomic<bool> is_connected_{false};
  std::mutex issuing_;
  uint32_t gates_ = 0;
  std::atomic<int> ungated_{0};
  std::atomic<bool> is_capturing_{false};
  std::atomic<Gpu::Word*> gate_{nullptr};
};

}  // namespace procgroup
