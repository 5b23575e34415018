#include "engine/notices.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "engine/transfer.hpp"

namespace procgroup {
namespace {

// Whether the failure has its cause in another rank, which is passed on.
bool has_cause(Failure::Kind kind) { return kind == Failure::Kind::kLost || kind == Failure::Kind::kFailed; }

}  // namespace

Notices::Notices(Messages& messages, const GroupView& group, MessageKey key)
    : messages_(messages), group_(group), key_(key), others_(group.members) {
  std::erase(others_, group_.world_rank(group_.rank));
}

Notices::~Notices() {
  if (!receive_ || receive_->is_over()) return;
  Failure aborted{};
  aborted.kind = Failure::Kind::kAborted;
  messages_.cancel(*receive_, std::move(aborted));
}

void Notices::listen() { receive_ = messages_.receive_up_to(kAnySource, key_, &arriving_, sizeof arriving_, &others_); }

const Failure* Notices::heard(uint64_t sequence) {
  if (others_.empty()) return nullptr;
  if (!receive_) listen();
  while (receive_->is_over()) {
    const bool nobody_is_left = receive_->failure() != nullptr && receive_->failure()->kind != Failure::Kind::kMismatch;
    if (nobody_is_left) break;
    take();
    listen();
  }
  return failure_ && sequence_ <= sequence ? &*failure_ : nullptr;
}

// A loss explains more than what it made other ranks do.
void Notices::take() {
  Failure failure = failed(group_.group_rank(receive_->source), "it sent a notice that cannot be read");
  uint64_t sequence = 0;
  if (receive_->failure() == nullptr && receive_->bytes == sizeof arriving_) {
    sequence = arriving_.sequence;
    failure.reason = readable(arriving_.reason, sizeof arriving_.reason);
    const bool names_another = arriving_.peer >= 0 && arriving_.peer < group_.size() && arriving_.peer != group_.rank;
    if (has_cause(arriving_.kind) && names_another) {
      failure.kind = arriving_.kind;
      failure.peer = arriving_.peer;
      failure.pid = arriving_.pid;
    }
  }
  if (failure_ && (failure_->kind == Failure::Kind::kLost || failure.kind != Failure::Kind::kLost)) return;
  failure_ = std::move(failure);
  sequence_ = sequence;
}

void Notices::tell(uint64_t sequence, const Failure& failure) {
  Notice notice{};
  notice.sequence = sequence;
  notice.pid = failure.pid;
  notice.peer = failure.peer;
  notice.kind = failure.kind;
  const std::string reason = has_cause(failure.kind) ? failure.reason : failure.summary(&group_.global_ranks);
  std::memcpy(notice.reason, reason.data(), std::min(reason.size(), sizeof notice.reason));
  const auto* bytes = reinterpret_cast<const std::byte*>(&notice);
  for (const int peer : others_) messages_.post(peer, key_, std::vector<std::byte>(bytes, bytes + sizeof notice));
}

}  // namespace procgroup
