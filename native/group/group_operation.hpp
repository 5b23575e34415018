// The operations of a group that may outlive a call: a collective that waits for its turn, a message, and the work that
// either has started on a device.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collective_call.hpp"
#include "liveness/deadlock.hpp"
#include "messages/messages.hpp"
#include "ops/request.hpp"
#include "runtime/recording.hpp"
#include "runtime/wait_report.hpp"
#include "runtime/waiting.hpp"

namespace procgroup {

class Group;

struct MessageRequest {
  OpKind op;     // kSend or kRecv
  void* data;    // not written by kSend
  size_t count;  // elements
  Dtype dtype;
  int peer;  // group rank, or kAnySource
  uint64_t tag;
  uint32_t source = 0;               // as in Request
  std::function<void()> after = {};  // as in Request: run when a receive has succeeded, before it completes
  std::shared_ptr<Task> task = {};   // as in Request; its `ready` is not asked
  bool external = false;             // the task moves the elements, and the engine a header in their place
  bool is_unawaited = false;         // as in Request
  // The array is on a device, whose queues run one transfer after the other: messages from one rank to another move in
  // the order in which the receiver has matched them.
  bool on_device = false;
};

// An operation of a group that may outlive the call which issued it: the call, its deadline and its record.
class GroupOperation : public Operation {
 public:
  GroupOperation(Group& group, const Descriptor& call, double seconds, bool is_unawaited)
      : group_(group),
        call_(call),
        seconds_(seconds),
        number_(call.sequence),
        unawaited_(is_unawaited),
        budget_(WaitPolicy{}, Deadline::after(seconds)) {}

  // From any thread; a collective has no number before its turn.
  Descriptor call() const;
  double seconds() const { return seconds_; }
  Deadline deadline() const { return budget_.deadline(); }
  virtual int source() const { return -1; }  // completed receives: the sender's group rank
  // No caller waits for it: see Request. A caller that has taken the stream on which it is queued does not, either.
  void set_unawaited() { unawaited_.store(true, std::memory_order_relaxed); }
  bool is_unawaited() const { return unawaited_.load(std::memory_order_relaxed); }
  virtual bool is_replay() const { return false; }  // of a call in a CUDA graph
  // Once it has completed: what goes on on a device; null where nothing does.
  const std::shared_ptr<GroupOperation>& device_work() const { return device_work_; }
  // The world ranks without which it cannot end; nothing where that is not known. Takes locks.
  virtual std::optional<Awaited> awaited() { return std::nullopt; }
  // What it may do while it is pending and a thread of this rank waits for another operation, which awaits these world
  // ranks.
  enum class Beside : uint8_t {
    kNothing,      // that another rank could wait for
    kOpenReceive,  // see Source::open_receives
    kAnything,
  };
  virtual Beside beside(const std::vector<int>& /*awaited*/) const { return Beside::kAnything; }
  // Of the thread that examines it.
  WaitBudget& budget() { return budget_; }
  WaitReport& wait_report() { return wait_report_; }
  // Somebody is to be told of its end, though no thread waits for it.
  void watch();
  bool is_watched() const { return watched_.load(std::memory_order_relaxed); }

 protected:
  void set_number(uint64_t number) { number_.store(number, std::memory_order_relaxed); }
  void queue(std::shared_ptr<GroupOperation> device_work) { device_work_ = std::move(device_work); }
  // The operation fails, and the group ends with it.
  void end_group(const Failure& failure, bool is_unawaited);

  Group& group_;
  const Descriptor call_;  // as it was issued
  const double seconds_;
  std::optional<Recording> recording_;
  std::mutex advancing_;  // held to advance a task; taken before the mutex of messages

 private:
  std::shared_ptr<GroupOperation> device_work_;
  std::atomic<uint64_t> number_;
  std::atomic<bool> watched_{false};
  std::atomic<bool> unawaited_;
  WaitBudget budget_;
  WaitReport wait_report_;
};

// Run a step of a call; return what it throws as a failure.
inline std::optional<Failure> failure_of(const std::function<void()>& step) {
  try {
    step();
    return std::nullopt;
  } catch (const std::exception& error) {
    return Broken{std::string("it cannot go on: ") + error.what()};
  }
}

// A collective that is numbered and started when all earlier ones have completed.
class CollectiveOperation final : public GroupOperation {
 public:
  // It is issued now.
  CollectiveOperation(Group& group, Request request, double seconds);

  Progress advance() override;
  Progress help() override { return is_completed() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override;
  void give_up(Failure failure) override;
  uint64_t moved() const override { return running_ ? running_->moved() : 0; }
  int64_t longest_sleep_ns() const override { return is_polling_ ? request_.task->longest_sleep_ns() : kAnySleepNs; }
  bool outlives_peer() const override { return running_ && running_->outlives_peer(); }
  bool waits_in_chain() const override { return running_ && running_->waits_in_chain(); }
  std::optional<Awaited> awaited() override;

 private:
  void end(const Failure* failure);

  Request request_;
  std::optional<CollectiveCall> running_;
  bool awaits_arrays_ = false;    // its turn has come, and it is not ready
  std::atomic<bool> is_polling_;  // its task, until that is ready, and while that moves its bytes
};

// A message that never waits for its receiver: see Messages.
inline bool is_small_message(const Descriptor& call) { return call.count * dtype_size(call.dtype) <= kEagerBytes; }

// A message. A thread that waits for it may advance it, beside the progress thread. If a task moves its bytes, the
// engine moves a header in their place, by which the receiver finds the sender and compares size and dtype.
class MessageOperation final : public GroupOperation {
 public:
  MessageOperation(Group& group, const MessageRequest& request, double seconds);
  ~MessageOperation() override;

  Progress advance() override;
  // As advance(). Looks at what has come only where `looks` is set, and clears it when there was nothing.
  Progress advance(bool& looks);
  std::vector<int> missing() const override;
  int source() const override;
  // Nothing once a message was matched, or from any source.
  std::optional<Awaited> awaited() override;
  Beside beside(const std::vector<int>& awaited) const override;
  bool depends_on_all() const override { return request_.peer == kAnySource; }
  void give_up(Failure failure) override;
  uint64_t moved() const override;
  int64_t longest_sleep_ns() const override { return header_moved_ ? request_.task->longest_sleep_ns() : kAnySleepNs; }
  bool outlives_peer() const override { return header_moved_; }
  // Whether both go from one rank to one other with one tag. With the mutex of messages.
  bool shares_order(const MessageOperation& other) const {
    return request_.op == other.request_.op && request_.tag == other.request_.tag && peer() == other.peer();
  }

 private:
  bool is_external() const { return request_.external; }
  struct Header {
    uint64_t count;
    uint64_t dtype;
    uint64_t number;  // of the message, given by its sender; on a device, in the end, by its receiver
  };

  void start();
  Progress advance_transfer(bool& looks);  // by the engine
  Progress advance_task();
  void conclude();
  void compare_header();
  void accept();
  void await_acceptance();
  bool has_dead_sender() const;
  // With the mutex of messages, as the next.
  int peer() const { return request_.op == OpKind::kSend ? request_.peer : source(); }
  void fail_by_mismatch(Failure failure, std::string theirs);
  // Whether a message has been matched to this receive, which writes to the caller's array itself.
  bool may_have_written() const {
    return request_.op == OpKind::kRecv && !request_.after && !request_.task && transfer_ && transfer_->source >= 0;
  }

  const MessageRequest request_;
  std::vector<int> sources_;  // world ranks that kAnySource may match
  std::shared_ptr<Transfer> transfer_;
  Header header_;
  bool awaits_acceptance_ = false;
  std::atomic<bool> header_moved_{false};  // or the message itself, where only the task is left to be run
  std::atomic<bool> awaits_peer_{false};   // the task has last said that it waits for the other rank
  std::optional<Task::State> task_;        // once it has been started; guarded by advancing_
};

// A task that its call has queued on a device.
class DeviceOperation final : public GroupOperation {
 public:
  DeviceOperation(Group& group, const Descriptor& call, std::shared_ptr<Task> task, double seconds, bool is_unawaited,
                  std::optional<Recording> recording)
      : GroupOperation(group, call, seconds, is_unawaited), task_(std::move(task)) {
    if (recording) recording_.emplace(*recording);
  }

  Progress advance() override;
  std::vector<int> missing() const override { return {}; }
  void give_up(Failure failure) override;
  int64_t longest_sleep_ns() const override { return kSleepNs; }
  // Nobody waits for the end of this work itself but whoever asks for it, and then looks.
  static constexpr int64_t kSleepNs = 1'000'000;
  bool outlives_peer() const override { return true; }
  bool is_replay() const override { return call_.captured; }

 private:
  void fail_with_group(const Failure& failure);
  void end(const Failure* failure);

  std::shared_ptr<Task> task_;  // guarded by advancing_
};

}  // namespace procgroup
