// Notices: what a rank whose call failed tells the other members of the group, over messages.
//
// A rank that awaits a healthy neighbour learns from them of a loss further away. And a rank that is late learns
// why the others are gone: a notice lies in front of the end of its sender's connection, and it counts for the call
// that failed and for all later ones, because a failure ends the group. To an earlier call, which its sender had made
// well, it tells why the sender is gone. So the rank that was lost is named, not one that left because of it.
#pragma once

#include <memory>
#include <optional>

#include "engine/group_view.hpp"
#include "engine/messages.hpp"

namespace procgroup {

// Made, used and destroyed under the mutex that guards Messages. Ranks in failures are group ranks.
class Notices {
 public:
  Notices(Messages& messages, const GroupView& group, MessageKey key);
  ~Notices();
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;

  // What another rank told about this call or one before; null when nobody did.
  const Failure* heard(uint64_t sequence);
  void tell(uint64_t sequence, const Failure& failure);

 private:
  // As it travels.
  struct Notice {
    uint64_t sequence;
    int64_t pid;
    int32_t peer;  // kLost, kFailed: the group rank
    Failure::Kind kind;
    char reason[499];
  };

  void listen();
  void take();

  Messages& messages_;
  const GroupView& group_;
  const MessageKey key_;
  std::vector<int> others_;  // world ranks
  Notice arriving_{};
  std::shared_ptr<Transfer> receive_;
  std::optional<Failure> failure_;
  uint64_t sequence_ = 0;  // of the call that failed
};

}  // namespace procgroup
