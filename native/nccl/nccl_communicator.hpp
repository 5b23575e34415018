// A communicator of NCCL's: the ranks of a group, or two of them, each with its GPU.
//
// Communicators are *blocking*, as those of PyTorch: a function of NCCL returns when its work is queued on a stream.
// The first calls connect the ranks, and wait on the host for the other ranks to make them, too; an abort by another
// thread ends that. Non-blocking ones start a thread for each call, and their state may be asked for by one thread
// only, between its calls (NCCL 2.32: src/group.cc, ncclGroupEnd, and src/init.cc, ncclCommGetAsyncError, which joins
// that thread without a lock).
//
// So no thread that watches over calls may be inside of NCCL. Each communicator has a thread of its own: it connects
// the ranks, makes the calls that no thread of the program makes, and ends the communicator.
//
// An abort frees the communicator. So it has two steps, inside of a group of NCCL's: first all communicators get the
// order, which ends what their work and calls wait for; when no thread is in a call any more, the group's end frees
// them. One after the other could wait for ever, each for another's work on the GPU (NVIDIA/nccl#1013). So those of all
// groups of ranks that fail at once, as with a lost rank, are aborted together. A group that fails later has a thread
// of its own, because the earlier end may wait for its work.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/gpu.hpp"
#include "nccl/nccl_library.hpp"

namespace procgroup {

class NcclCommunicator : public std::enable_shared_from_this<NcclCommunicator> {
 public:
  // Connect the ranks, which all have the id. `config` is an ncclConfig_t.
  static std::shared_ptr<NcclCommunicator> connect(std::shared_ptr<const NcclLibrary> library, Gpu& gpu, int size,
                                                   int rank, const NcclId& id, std::string config);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether the ranks are connected. Throws std::runtime_error where they cannot be.
  bool is_connected();
  // Make a call of NCCL's, or several as one, by a function that returns NCCL's result. Throws std::runtime_error for
  // an error, and after an abort.
  template <class Calls>
  void call(bool are_several, Calls calls) {
    const std::lock_guard calling(calling_);
    const NcclHandle communicator = usable_handle();
    if (are_several) library_->require(library_->ncclGroupStart());
    const int result = calls(communicator);
    const int ended = are_several ? library_->ncclGroupEnd() : 0;
    library_->require(result);
    library_->require(ended);
  }
  // Run a function, which makes calls, in the communicator's thread; not at all after an abort. It throws nothing.
  void post(std::function<void()> calls);
  // Throws std::runtime_error for an error of the work that is queued.
  void check();
  // Keep something until the communicator has ended.
  void keep(std::shared_ptr<const void> kept);

  // End all work of these communicators, whatever it waits for, in a thread. `begin` is called when they have been
  // told.
  static void abort(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators, std::function<void()> begin);
  // Whether a thread frees communicators. It may hold up other threads' calls of CUDA until the work of a group has
  // ended that is still to be aborted: who watches over groups makes none meanwhile.
  static bool is_freeing();
  // End these communicators together with the other ranks, when their work has ended; for at most so many seconds,
  // after which their threads go on with it.
  static void close(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators, double seconds);

 private:
  enum class State : uint8_t { kConnecting, kConnected, kFailed, kClosing, kEnded, kAborted };

  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, Gpu& gpu) : library_(std::move(library)), gpu_(gpu) {}

  bool is_usable() const;
  NcclHandle usable_handle();
  void run(int size, int rank, const NcclId& id, std::string& config);
  void make(int size, int rank, const NcclId& id, std::string& config);
  void let_go();
  static void end_aborted();

  const std::shared_ptr<const NcclLibrary> library_;
  Gpu& gpu_;
  std::mutex calling_;  // held inside of NCCL
  std::mutex mutex_;    // guards what follows
  std::condition_variable changed_;
  State state_ = State::kConnecting;
  NcclHandle handle_ = nullptr;
  std::string error_;  // that made the connection fail
  std::deque<std::function<void()>> posted_;
  std::vector<std::shared_ptr<const void>> kept_;
};

}  // namespace procgroup
