#include "collectives/confirmation.hpp"

namespace procgroup {

Progress Confirmation::advance(const GroupMessages& through) {
  const GroupView& group = through.group;
  const MessageKey key = through.confirmation_key(sequence_);
  bool moved = false;
  while (distance_ < group.size()) {
    if (!receive_) {
      awaited_ = (group.rank - distance_ + group.size()) % group.size();
      receive_ = through.messages.receive(group.world_rank(awaited_), key, nullptr, 0);
      through.messages.post(group.world_rank((group.rank + distance_) % group.size()), key, {});
    }
    if (!receive_->is_completed()) return moved ? Progress::kMoved : Progress::kWaiting;
    if (const Failure* failure = receive_->failure()) {
      failure_ = group.by_group_rank(*failure);
      return Progress::kDone;
    }
    receive_.reset();
    awaited_ = -1;
    distance_ *= 2;
    moved = true;
  }
  return Progress::kDone;
}

void Confirmation::cancel(const GroupMessages& through) {
  if (receive_ && !receive_->is_completed()) through.messages.cancel(*receive_, Aborted{});
}

}  // namespace procgroup
