// What one rank shows the other members of one group in its arena.
//
//     group memory of rank r                                                 staging blocks, from pools of the rank
//     +----------------+-------------+----------+----------+-------+----------+      +---------+---------+
//     | announcements  | descriptors | progress | finished | state | departed |      | small 0 | small 1 |
//     | 0 and 1        | 0 and 1     | + slots  |          |       |          |      |         |         |
//     +----------------+-------------+----------+----------+-------+----------+      +---------+---------+
//          |                              |                                          ^
//          +-- where the small areas lie -|------------------------------------------+
//                                         |                          +------+------+------+------+
//                                         +-- where the slots lie -->| slot | slot | slot | slot |
//                                                                    +------+------+------+------+
//
// Vocabulary. An *announcement* announces one call: its sequence number, its fingerprint, where its small areas lie
// and, up to 40 bytes, its data, all in one cache line. Calls use the two announcements in turn (as they do the two
// *small* areas, which hold the data of medium calls). That is enough, because every call awaits the announcements of
// all members: a rank that announces call n+2 has seen everybody announce n+1, so everybody is done with call n. A
// *slot* holds one chunk of a large array. *Progress* counts, over the group's whole life, what this rank has finished
// in its slots; it never goes back. *Finished* is the last call of which this rank reads nothing any more. A group has
// a *staging block* only while it needs one (transport/staging_pool.hpp), so that a thousand groups cost about a
// megabyte each rank; each member of another host that a leader represents costs it about as much.
//
// Memory order. An announcement's `sequence` and `progress` are written last, sequentially consistent: as release,
// they publish everything written before; as part of the one total order, they make the writer's next
// look at `sleepers` safe (see Arena::wake). Readers load them sequentially consistent for the same reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ops/descriptor.hpp"
#include "runtime/failure_record.hpp"
#include "transport/arena.hpp"

namespace procgroup {

inline constexpr size_t kInlinePayload = 40;
inline constexpr int kSlots = 4;

struct alignas(64) Announcement {
  std::atomic<uint64_t> sequence;
  uint64_t fingerprint;
  uint64_t small;  // offset in the arena: where this call's small areas lie; 0 when it has none
  std::byte payload[kInlinePayload];
};
static_assert(sizeof(Announcement) == 64);

enum class MemberState : uint32_t {
  kPresent,
  kLeft,    // in order; takes part in no call after the last one that it announced
  kFailed,  // gave up; `failure` says why
};

struct GroupMemory {
  Announcement announcements[2];
  alignas(64) Descriptor descriptors[2];
  alignas(64) std::atomic<uint64_t> progress;
  uint64_t slots[2];                           // offsets in the arena of the slots of calls, in turn
  alignas(64) std::atomic<uint64_t> finished;  // release: what this rank read of that call it has read
  alignas(64) std::atomic<MemberState> state;  // release-stored after the two fields below
  FailureHead failure;
  uint64_t failure_details;  // offset in the arena; 0 where there was no memory for them
  // The last call that this rank gave up; stored before its arrays go back to their user. Until then, and until all
  // have acknowledged (progress), the arrays of a call are exposed: a rank that reads them in place looks here
  // afterwards.
  std::atomic<uint64_t> given_up;
  // Of the leader of a host in a group that spans hosts: offset of the memory in which it announces, in the members'
  // place, the calls of the other hosts' members; release-stored, 0 until it is made. See collectives/relay.hpp.
  std::atomic<uint64_t> proxies;
};

// How large group memory and staging blocks are; equal on all members.
struct GroupLayout {
  size_t small_bytes = 16 * 1024;
  size_t slot_bytes = 384 * 1024;
  size_t chunk_bytes = 256 * 1024;  // at most a slot; two ranks that exchange halves use two whole slots

  // Group memory ends with one byte for each member, in which that member says that it has left and reads no more.
  static size_t memory_bytes(size_t members) { return sizeof(GroupMemory) + members; }
  size_t small_block_bytes() const { return 2 * small_bytes; }
  size_t slots_block_bytes() const { return kSlots * slot_bytes; }
};
static_assert(sizeof(GroupMemory) % 64 == 0);

// One member's group memory, as this process sees it.
class GroupMemoryView {
 public:
  GroupMemoryView() = default;  // none yet
  // Throws std::out_of_range when group memory cannot lie at `offset`.
  GroupMemoryView(const Arena& arena, uint64_t offset, size_t members, const GroupLayout& layout)
      : arena_(&arena), base_(arena.at_line(offset, GroupLayout::memory_bytes(members))), layout_(layout) {}

  explicit operator bool() const { return base_ != nullptr; }
  const Arena& arena() const { return *arena_; }
  GroupMemory& memory() const { return *reinterpret_cast<GroupMemory*>(base_); }
  Announcement& announcement(uint64_t sequence) const { return memory().announcements[sequence & 1]; }
  Descriptor& descriptor(uint64_t sequence) const { return memory().descriptors[sequence & 1]; }
  // Release-stored by that member, once, when it has left.
  std::atomic<uint8_t>& departed(int member) const {
    return reinterpret_cast<std::atomic<uint8_t>*>(base_ + sizeof(GroupMemory))[member];
  }
  // The owner: where its small areas lie, before it announces the call; where its slots lie, before it publishes
  // progress in the call, which may be before it announces it.
  void place_small(uint64_t sequence, uint64_t offset) const { announcement(sequence).small = offset; }
  void place_slots(uint64_t sequence, uint64_t offset) const { memory().slots[sequence & 1] = offset; }
  // In calls that have small areas, once the announcement has been seen.
  std::byte* small(uint64_t sequence) const {
    return arena_->at_line(announcement(sequence).small, layout_.small_block_bytes()) +
           (sequence & 1) * layout_.small_bytes;
  }
  // Once progress of this call has been seen.
  std::byte* slot(uint64_t sequence, int index) const {
    std::byte* const slots = arena_->at(memory().slots[sequence & 1], layout_.slots_block_bytes());
    return slots + static_cast<size_t>(index) * layout_.slot_bytes;
  }
  // Where a call's data lies when it fits beside its announcement.
  std::byte* payload(uint64_t sequence, size_t bytes) const {
    return bytes <= kInlinePayload ? announcement(sequence).payload : small(sequence);
  }

 private:
  const Arena* arena_ = nullptr;
  std::byte* base_ = nullptr;
  GroupLayout layout_{};
};

}  // namespace procgroup
