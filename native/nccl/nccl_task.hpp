// One call whose bytes NCCL moves. It has a place in the group's queue, and one on a stream: see nccl_backend.hpp.
//
//     behind a gate    take_gate, queue_behind_gate    start: open the gate    test: until the GPU has come to its end
//     otherwise                                        test: post it           test: the same
//     in a capture                                     start                   then `capture`, in the caller's thread
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu.hpp"
#include "nccl/nccl_backend.hpp"

namespace procgroup {

// The blocks that this rank gives and takes. Several arrays of an all_reduce are as many of both; where it takes none,
// it works in place.
struct NcclCall {
  OpKind op;
  Dtype dtype;
  ReduceOp reduce_op;
  double factor;  // of PREMUL_SUM
  int root;
  std::vector<DeviceSpan> inputs;
  std::vector<DeviceSpan> outputs;
};

class NcclTask final : public DeviceTask, public std::enable_shared_from_this<NcclTask> {
 public:
  // The call comes after what is queued on these streams now, on which its arrays are used, and which `owner` keeps
  // alive. A collective is queued on the first of them where `stays` says so and there is one. All else has a stream of
  // the group's: a message must not wait for one in the other direction.
  // Throws std::runtime_error for an error of the driver.
  NcclTask(std::shared_ptr<NcclBackend> backend, NcclCall call, std::vector<CudaStream> streams, bool stays,
           std::shared_ptr<const void> owner);
  NcclTask(const NcclTask&) = delete;
  NcclTask& operator=(const NcclTask&) = delete;
  ~NcclTask() override;

  // With NcclBackend::issuing: the gate, before the call gets its place in the group's queue, and then its place on the
  // stream, where this thread may wait for other ranks. An error of the latter fails the call.
  void take_gate() { gate_ = backend_->next_gate(); }
  void queue_behind_gate();
  // With NcclBackend::issuing: the call has no gate, and later ones have none before it is queued.
  void queue_later();
  // Whether the arrays' streams are in a capture: then, when the ranks have agreed, the call becomes part of the graph.
  // From now on a test tells whether the graph has run the call for long. Throws std::runtime_error for an error.
  bool is_captured() const { return is_captured_; }
  void capture();
  // Whether all streams of the arrays come after the call once it is queued.
  bool stays() const { return stays_ && streams_.size() == 1; }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  bool ready() override;
  void start(int root, uint64_t number) override;
  State test(std::vector<int>& awaited) override;
  void let_wait(const std::vector<CudaStream>& streams) override;
  CudaStream queued_on() const override { return is_queued_.load(std::memory_order_acquire) ? stream_ : nullptr; }
  // A failure lets NCCL's work begin that stands behind a gate, and it may notice late that it is to leave.
  bool may_have_written() const override { return gate_ != 0; }
  // Whether blocks are put in their places after NCCL's work: what comes after that in the stream cannot be kept from
  // running, so such a call takes no gate.
  bool copies_out() const { return call_.op == OpKind::kAllGather && is_apart(call_.outputs); }

 private:
  static bool is_apart(const std::vector<DeviceSpan>& blocks);
  bool post();
  void queue();
  void make(NcclCommunicator& communicator);
  int call_nccl(NcclHandle communicator) const;
  bool is_one_call() const;
  NcclBackend::Pair ranks() const;
  NcclType type() const;
  void require_no_error() const;
  void fail(const char* error);
  bool has_ended();
  State replay();
  void check_sometimes();

  const std::shared_ptr<NcclBackend> backend_;
  const NcclLibrary& nccl_;
  Gpu& gpu_;
  NcclCall call_;
  std::shared_ptr<const void> owner_;
  std::vector<CudaStream> streams_;  // on which the arrays are used
  bool stays_;                       // on the first of them
  CudaStream stream_ = nullptr;      // that of the call, once it is known
  std::vector<CudaEvent> events_;    // on the others, which the call comes after
  CudaAddress scratch_ = 0;          // of blocks that are joined, or are still to be copied to their places
  int op_ = 0;                       // NCCL's number, of PREMUL_SUM that of the call
  uint32_t gate_ = 0;                // 0: none
  bool is_captured_ = false;
  bool is_later_ = false;
  bool has_come_to_its_end_ = false;  // a test has seen that
  bool is_posted_ = false;            // it is queued, or the communicator's thread is to queue it
  uint64_t number_ = 0;
  std::shared_ptr<NcclCommunicator> communicator_;
  Gpu::Word* done_ = nullptr;              // becomes kDone when the GPU has come to the end
  std::atomic<CudaEvent> ended_{nullptr};  // there, too, where a stream may have to wait for it, and without words
  std::weak_ptr<void> graph_;              // lives as long as the graph into which the call was captured
  int64_t seen_ns_ = 0;                    // when a replay of it was first seen
  int64_t checked_ns_ = 0;                 // when NCCL was last asked for errors
  std::atomic<bool> is_queued_{false};     // all of the above is set
  std::atomic<bool> has_failed_{false};
  std::string error_;  // then
};

}  // namespace procgroup
