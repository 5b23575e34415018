// The failure board of one group: the failure that each member has posted. All failures spread through it.
//
//     post(failure)      members that share memory    a record in this rank's group memory; sleepers are woken
//                        other members                the same record as a message, kept by the reader's board
//     read(member)       from the member's memory, or the message that came from it
//
// A message arrives before the end of its sender's connection. So a rank that is late still learns why the others left,
// and names the rank that was lost first, not one that left because of it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "collectives/group_view.hpp"
#include "group/group_heap.hpp"
#include "messages/messages.hpp"
#include "runtime/failure_record.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {

// Ranks in failures are group ranks. Unless said otherwise, under the mutex that guards Messages.
class FailureBoard {
 public:
  // `on_news` is called, under that mutex, when a record has come as a message.
  FailureBoard(Messages& messages, GroupView group, std::function<void()> on_news);
  ~FailureBoard();
  FailureBoard(const FailureBoard&) = delete;

  // Set-up: members that share memory read this rank's post there. Its details are taken from the heap, which outlives
  // the board.
  void share(GroupMemoryView own, GroupHeap& heap);
  // Set-up: where the posts of members that share memory are read; a member without memory posts messages.
  void attach(std::vector<std::optional<GroupMemoryView>> members) { members_ = std::move(members); }

  // Post why this rank's part in the group has failed, once.
  void post(const Failure& failure);
  // The failure that a member has posted, if any.
  std::optional<Failure> read(int member) const;
  // Not under the mutex: the same for a member that shares memory. Nothing for others.
  std::optional<Failure> read_memory(int member) const;

  // The memory of this rank's details, to be given back when nobody reads the group memory any more: offset and bytes;
  // 0 when there is none.
  std::pair<uint64_t, size_t> details() const { return {details_, details_bytes_}; }

 private:
  void post_in_memory(const Failure& failure);
  bool shares(int member) const;
  MessageKey key() const;

  Messages& messages_;
  const GroupView group_;
  std::optional<GroupMemoryView> own_;
  GroupHeap* heap_ = nullptr;
  std::vector<std::optional<GroupMemoryView>> members_;
  std::vector<std::optional<Failure>> received_;  // by group rank
  uint64_t details_ = 0;
  size_t details_bytes_ = 0;
};

}  // namespace procgroup
