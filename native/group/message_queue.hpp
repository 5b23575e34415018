// The messages of a group: those that go at once, and those that are pending. They never wait for collectives.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/group_operation.hpp"

namespace procgroup {

class MessageQueue {
 public:
  explicit MessageQueue(Group& group) : group_(group) {}
  MessageQueue(const MessageQueue&) = delete;

  // Blocking, for at most that many seconds; return the sender's group rank. Throws OperationFailed.
  int run(const MessageRequest& request, double seconds, LanguageRuntime& language);
  std::shared_ptr<GroupOperation> start(const MessageRequest& request, double seconds);
  // An asynchronous message, if it is small and can be sent or received at once; the peer's group rank if it was.
  std::optional<int> start_at_once(const MessageRequest& request);
  // Number a message, which is issued now.
  Descriptor describe(const MessageRequest& request);
  // Of a receive that fails: the messages of that sender that have come with other tags. With the mutex of Messages.
  std::string unread(const MessageRequest& request) const;

  bool is_idle() const;
  // As the functions of Source.
  Progress advance();
  std::vector<std::shared_ptr<GroupOperation>> pending() const;
  int64_t longest_sleep_ns() const;
  bool note_pending();
  std::optional<size_t> open_receives(const Operation& waited, const std::vector<int>& awaited) const;

  // Messages that another backend moves; all of these with the mutex of Messages. A message has its turn when no
  // earlier one of the same sender, receiver and tag is to be moved, from its start on until it is forgotten.
  void add_external(const MessageOperation* message) { external_.push_back(message); }
  bool has_turn(const MessageOperation& message) const;
  void forget(const MessageOperation* message) { std::erase(external_, message); }
  // The number of the next message on a device that is matched of this member.
  uint64_t number_matched(int sender);

 private:
  static constexpr size_t kFewMessages = 64;
  static constexpr int kReceiveCredits = 4;
  // Looks for a message, of 7 us together: a peer that begins to send at the same time has sent by then.
  static constexpr int kReceivePolls = 120;

  // Send or receive a small message if that is possible in so many looks.
  std::optional<int> try_at_once(const MessageRequest& request, int looks = 1);
  AtOnce try_message(const MessageRequest& request);
  AtOnce try_receive_from_any(MessageRequest& request);
  static bool may_rest(const GroupOperation& message);
  [[nodiscard]] std::vector<std::shared_ptr<GroupOperation>> sweep();

  Group& group_;
  std::atomic<uint64_t> sequence_{0};                  // of the last message that was issued
  std::atomic<int> receive_credits_{kReceiveCredits};  // see start_at_once()
  // With the mutex of Messages: in the order in which they started; how many on devices have been matched of each
  // member; see try_receive_from_any().
  std::vector<const MessageOperation*> external_;
  std::vector<uint64_t> matched_;
  int looked_first_at_ = 0;
  mutable std::mutex mutex_;                                 // guards what follows
  std::vector<std::shared_ptr<MessageOperation>> messages_;  // completed ones stay for a while
  size_t crowded_ = kFewMessages;                            // messages_ is swept when it is as long as this
  uint64_t looked_at_ = 0;                                   // the last message that the progress thread has noted
};

}  // namespace procgroup
