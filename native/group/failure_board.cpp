#include "group/failure_board.hpp"

#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace procgroup {
namespace {

// Users' tags do not have the highest bit. Those of announcements have no other one; all other tags of collectives
// contain a sequence number, which is never 0.
constexpr uint64_t kTag = uint64_t{1} << 63 | 2;

}  // namespace

FailureBoard::FailureBoard(Messages& messages, GroupView group, std::function<void()> on_news)
    : messages_(messages), group_(std::move(group)), members_(group_.members.size()), received_(group_.members.size()) {
  messages_.listen(key(), [this, on_news = std::move(on_news)](int source, const std::vector<std::byte>& record) {
    const int member = group_.group_rank(source);
    if (member < 0 || received_[static_cast<size_t>(member)]) return;
    std::optional<Failure> failure = decode(record, group_.size());
    if (!failure) failure = Broken{"it sent a failure record that cannot be read"};
    received_[static_cast<size_t>(member)] = std::move(failure);
    on_news();
  });
}

FailureBoard::~FailureBoard() { messages_.listen(key(), nullptr); }

MessageKey FailureBoard::key() const { return {group_.id, kTag}; }

void FailureBoard::share(GroupMemoryView own, GroupHeap& heap) {
  own_ = own;
  heap_ = &heap;
}

bool FailureBoard::shares(int member) const { return members_[static_cast<size_t>(member)].has_value(); }

void FailureBoard::post(const Failure& failure) {
  if (own_) post_in_memory(failure);
  // Every member has got the message that this rank got; and each finds by itself that calls differ, and can then say
  // what it called.
  if (failure.relayed || failure.is<Mismatch>()) return;
  const std::vector<std::byte> record = encode(failure, group_.size());
  for (int member = 0; member < group_.size(); ++member)
    if (member != group_.rank && !shares(member)) messages_.post(group_.world_rank(member), key(), record);
}

void FailureBoard::post_in_memory(const Failure& failure) {
  GroupMemory& memory = own_->memory();
  const std::vector<std::byte> details = details_of(failure, group_.size());
  memory.failure = head_of(failure, group_.size());
  if (!details.empty()) {
    try {
      details_ = heap_->take(details.size());
      details_bytes_ = details.size();
      std::memcpy(heap_->at(details_, details.size()), details.data(), details.size());
    } catch (const std::system_error&) {
      details_ = 0;  // memory is refused: the head names the cause without them
    }
  }
  memory.failure_details = details_;
  memory.state.store(MemberState::kFailed, std::memory_order_seq_cst);
}

std::optional<Failure> FailureBoard::read(int member) const {
  if (shares(member)) return read_memory(member);
  return received_[static_cast<size_t>(member)];
}

std::optional<Failure> FailureBoard::read_memory(int member) const {
  if (!shares(member)) return std::nullopt;
  const GroupMemoryView& view = *members_[static_cast<size_t>(member)];
  const GroupMemory& memory = view.memory();
  if (memory.state.load(std::memory_order_acquire) != MemberState::kFailed) return std::nullopt;
  FailureHead head;
  std::memcpy(&head, &memory.failure, sizeof head);  // once: that member may write it at any time
  std::span<const std::byte> details;
  try {
    const size_t bytes = details_bytes(head);
    if (const uint64_t offset = memory.failure_details; offset != 0) details = {view.arena().at(offset, bytes), bytes};
  } catch (const std::out_of_range&) {
    details = {};
  }
  const std::optional<Failure> failure = decode(head, details, group_.size());
  if (failure) return failure;
  return Broken{"its failure record cannot be read"};
}

}  // namespace procgroup
