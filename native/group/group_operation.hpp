// The operations of a group that may outlive a call: a collective that waits for its turn, a message, and the work that
// either has started on a device.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "group/group.hpp"
#include "liveness/deadlock.hpp"
#include "runtime/recording.hpp"

namespace procgroup {

// Run a step of a call; return what it throws as a failure.
inline std::optional<Failure> failure_of(const std::function<void()>& step) {
  try {
    step();
    return std::nullopt;
  } catch (const std::exception& error) {
    return Failure{.kind = Failure::Kind::kBroken, .reason = std::string("it cannot go on: ") + error.what()};
  }
}

// A collective that is numbered and started when all earlier ones have completed.
class QueuedCall final : public GroupOperation {
 public:
  QueuedCall(Group& group, Request request, double seconds);

  // It is issued now.
  void record();

  Progress advance() override;
  Progress help() override { return is_completed() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override;
  Descriptor call() const override { return request_.descriptor; }
  Descriptor call_so_far() const override;
  void give_up(Failure failure) override;
  uint64_t moved() const override { return running_ ? running_->moved() : 0; }
  int64_t longest_sleep_ns() const override { return is_polling_ ? request_.task->longest_sleep_ns() : kAnySleepNs; }
  bool outlives_peer() const override { return running_ && running_->outlives_peer(); }
  bool waits_in_chain() const override { return running_ && running_->waits_in_chain(); }
  std::optional<Awaited> awaited() override;

 private:
  void end(const Failure* failure);

  Request request_;
  const Descriptor issued_;          // before its turn
  std::atomic<uint64_t> number_{0};  // from its turn on
  std::optional<Recording> recording_;
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
  Descriptor call() const override { return call_; }
  int source() const override;
  // Nothing once a message was matched, or from any source.
  std::optional<Awaited> awaited() override;
  Beside beside(const std::vector<int>& awaited) const override;
  bool depends_on_all() const override { return request_.peer == kAnySource; }
  void give_up(Failure failure) override;
  uint64_t moved() const override;
  int64_t longest_sleep_ns() const override { return header_moved_ ? request_.task->longest_sleep_ns() : kAnySleepNs; }
  bool outlives_peer() const override { return header_moved_; }

 private:
  struct Header {
    uint64_t count;
    uint64_t dtype;
    uint64_t number;  // of the message, given by its sender; on a device, in the end, by its receiver
  };

  void start();
  Progress advance_transfer(bool& looks);  // by the engine
  Progress advance_task();
  bool is_external() const { return request_.external; }
  void conclude();
  void compare_header();
  void accept();
  void await_acceptance();
  bool has_dead_sender() const;
  void end_group(const Failure& failure);
  // With the mutex of messages, as the next three.
  int peer() const { return request_.op == OpKind::kSend ? request_.peer : source(); }
  bool has_turn() const;
  void forget();
  void fail_by_mismatch(Failure failure, std::string theirs);
  // Whether a message has been matched to this receive, which writes to the caller's array itself.
  bool may_have_written() const {
    return request_.op == OpKind::kRecv && !request_.after && !request_.task && transfer_ && transfer_->source >= 0;
  }

  const MessageRequest request_;
  const Descriptor call_;
  std::vector<int> sources_;  // world ranks that kAnySource may match
  std::optional<Recording> recording_;
  std::shared_ptr<Transfer> transfer_;
  Header header_;
  bool awaits_acceptance_ = false;
  std::atomic<bool> header_moved_{false};  // or the message itself, where only the task is left to be run
  std::atomic<bool> awaits_peer_{false};   // the task has last said that it waits for the other rank
  std::optional<Task::State> task_;        // once it has been started; guarded by advancing_
  std::mutex advancing_;                   // held to advance the task; taken before the mutex of messages
};

// A task that its call has queued on a device.
class DeviceOperation final : public GroupOperation {
 public:
  DeviceOperation(Group& group, const Descriptor& call, std::shared_ptr<Task> task, double seconds, bool is_unawaited,
                  std::optional<Recording> recording)
      : GroupOperation(group, call.bytes(), seconds),
        call_(call),
        recording_(std::move(recording)),
        task_(std::move(task)) {
    if (is_unawaited) set_unawaited();
  }

  Progress advance() override;
  std::vector<int> missing() const override { return {}; }
  Descriptor call() const override { return call_; }
  void give_up(Failure failure) override;
  int64_t longest_sleep_ns() const override { return kSleepNs; }
  // Nobody waits for the end of this work itself but whoever asks for it, and then looks.
  static constexpr int64_t kSleepNs = 1'000'000;
  bool outlives_peer() const override { return true; }
  bool is_replay() const override { return call_.captured; }

 private:
  void end_group(const Failure& failure);
  void end(const Failure* failure);

  const Descriptor call_;
  std::mutex looking_;  // guards what follows
  std::optional<Recording> recording_;
  std::shared_ptr<Task> task_;
};

}  // namespace procgroup
