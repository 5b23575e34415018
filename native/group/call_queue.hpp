// The collectives of a group: numbers them, and runs them in order.
//
// Collectives are first in, first out. A blocking call on an idle group runs in the caller's thread; when anything is
// pending it queues behind that, and the progress thread runs it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "group/group_operation.hpp"

namespace procgroup {

class CallQueue {
 public:
  explicit CallQueue(Group& group) : group_(group) {}
  CallQueue(const CallQueue&) = delete;

  // Make reductions combine in the order of the group's ranks. Before the first call; all ranks must agree.
  void reduce_in_rank_order() { ordered_ = true; }
  bool reduces_in_rank_order() const { return ordered_; }
  // Whether the input of a call may be given as iovecs: a broadcast on its root, or an all_gather, if it is not small.
  bool takes_iovecs(const Descriptor& call) const;
  // Whether a collective's elements are sent beside the announcement, so that nothing is left to be moved when the
  // ranks have agreed. The same on all ranks.
  bool is_announced_whole(const Descriptor& call) const;
  // The name of the schedule of the last collective, when it has completed; "small" where it needed none. For tests.
  const char* last_schedule() const;

  // Blocking, for at most that many seconds. Throws OperationFailed.
  void run(Request& request, double seconds, LanguageRuntime& language);
  // Asynchronous. With a language, whose lock is held, the caller's thread runs the call itself as long as that moves,
  // where there is no core to spare for the progress thread: to wake it would take the caller's core away. Without one,
  // or with a core to spare, it only announces a call whose bytes a device moves.
  std::shared_ptr<GroupOperation> start(Request request, double seconds, LanguageRuntime* language = nullptr);
  // Wait in this thread for an operation of this group, at most until `deadline`; whether it has completed, or a
  // signal's handler has ended the wait. Return what has made it fail, which is a deadlock where this wait was part of
  // one.
  struct Outcome {
    bool has_completed = false;
    bool is_interrupted = false;
    std::optional<Failure> failure{};
  };
  Outcome await(GroupOperation& operation, Deadline deadline, LanguageRuntime& language);
  // Wait as a blocking call does. Throws OperationFailed.
  void complete(GroupOperation& operation, LanguageRuntime& language);
  // A signal's handler has ended the wait of a blocking call: end the group, and wait for the end of the call.
  void end_interrupted(GroupOperation& operation, LanguageRuntime& language);

  // Throw OperationFailed if the group has ended.
  void require_usable(Descriptor call, const GroupOperation* last_queued = nullptr);
  // A call that ends before its turn has no number: it would have had the next one.
  Descriptor numbered(Descriptor call) const;
  std::optional<Descriptor> first_unawaited();
  Descriptor first_without_this_rank(const Descriptor& call) const;
  // The number of the last collective whose turn has ended.
  uint64_t ended() const { return ended_.load(std::memory_order_acquire); }
  // Nothing is queued or running.
  bool is_idle() const {
    return queued_.load(std::memory_order_acquire) == 0 && !busy_.load(std::memory_order_acquire);
  }
  bool is_empty() const;
  bool has_device_calls() const;
  // While a call is running, that call compares the earlier ones itself.
  void break_with_unseen();
  // As the functions of Source.
  Progress advance(const GroupOperation* own = nullptr);
  void examine();
  std::vector<std::shared_ptr<GroupOperation>> pending() const;
  int64_t longest_sleep_ns() const;
  bool has_other_than(const Operation& waited) const;

  // For queued calls: after its turn has come, a call is numbered; when it has succeeded, what goes on on a device is
  // followed; when it has ended, its turn ends, and with a failure the group.
  void number(Descriptor& call);
  std::shared_ptr<GroupOperation> conclude(const Request& request, const CollectiveCall& call, double seconds,
                                           const Recording& recording);
  void end_turn(const GroupOperation& operation, const Failure* failure);
  // While this is held, the head of the queue is not advanced.
  [[nodiscard]] std::unique_lock<std::mutex> hold() { return std::unique_lock(driving_); }

 private:
  // At the end of the scope in which the caller's thread may run a call.
  struct FinishTurn {
    void operator()(CallQueue* calls) const { calls->finish_turn(); }
  };

  // End an operation of the group from the thread that waits for it; one of the queue is at its head.
  void give_up(GroupOperation& operation, Failure failure);
  std::pair<std::shared_ptr<GroupOperation>, bool> enqueue(Request request, double seconds);
  void identify(Descriptor& call) const;
  void run_along(const GroupOperation& operation);
  bool announce(GroupOperation& operation);
  Progress advance_head(const GroupOperation* own);
  void finish_turn();
  bool has_turn(const GroupOperation& operation);  // with driving_
  void end_with(const GroupOperation& call, const Failure& failure);

  Group& group_;
  bool ordered_ = false;
  std::atomic<uint64_t> sequence_{0};  // of the last collective that has started; written in its turn
  std::atomic<uint64_t> ended_{0};
  std::atomic<bool> busy_{false};  // a call is running
  std::atomic<int> queued_{0};     // calls in queue_
  mutable std::mutex mutex_;       // guards queue_
  std::deque<std::shared_ptr<GroupOperation>> queue_;
  std::mutex driving_;                        // held to advance the head of queue_; taken before other mutexes
  bool head_has_turn_ = false;                // guarded by driving_: busy_ is held for the head of queue_
  std::atomic<bool> has_missed_look_{false};  // a thread could not look, because another one had driving_
};

}  // namespace procgroup
