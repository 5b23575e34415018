// The two kinds of operations that a group queues: a collective that waits for its turn, and a message.
#pragma once

#include <memory>

#include "group/group.hpp"
#include "liveness/deadlock.hpp"
#include "runtime/recording.hpp"

namespace procgroup {

// A collective that is numbered and started when everything before it is over.
class QueuedCall final : public GroupOperation {
 public:
  QueuedCall(Group& group, Request request, double seconds);

  Progress advance() override;
  std::vector<int> missing() const override;
  Descriptor call() const override { return request_.descriptor; }
  void give_up(Failure failure) override;

 private:
  void end(const Failure* failure);

  Request request_;
  std::optional<Recording> recording_;
  std::unique_ptr<Operation> running_;
};

// Its bytes wait for nobody: see Messages.
inline bool is_small_message(const Descriptor& call) { return call.count * dtype_size(call.dtype) <= kEagerBytes; }

// A message. Whoever waits for it may advance it, beside the progress thread.
class MessageOperation final : public GroupOperation {
 public:
  MessageOperation(Group& group, const MessageRequest& request, double seconds);
  ~MessageOperation() override;

  Progress advance() override;
  Progress help() override { return advance(); }
  std::vector<int> missing() const override;
  Descriptor call() const override { return call_; }
  int source() const override;
  // The rank without which it cannot end; nothing once a message was matched, or from any source.
  std::optional<Awaited> awaited() const;
  bool depends_on_all() const override { return request_.peer == kAnySource; }
  void give_up(Failure failure) override;

 private:
  void start();
  void conclude();
  // Whether a message has been matched to this receive, which writes to the caller's array itself.
  bool may_have_written() const {
    return request_.op == OpKind::kRecv && !request_.after && transfer_ && transfer_->source >= 0;
  }

  const MessageRequest request_;
  const Descriptor call_;
  std::vector<int> sources_;  // world ranks that kAnySource may match
  std::optional<Recording> recording_;
  std::shared_ptr<Transfer> transfer_;
};

}  // namespace procgroup
