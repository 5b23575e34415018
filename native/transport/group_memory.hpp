// The memory that one rank shares with the other members of one group, in its arena.
//
//     group memory of rank r
//     +----------------+-----+-----------------+-------------+----------+-------+----------+-------+----------+
//     | announcement 0 | ... | announcement 15 | descriptors | progress | slots | finished | state | departed |
//     +--------|-------+-----+--------|--------+-------------+----------+---|---+----------+-------+----------+
//              | offset of the        |                                     | offset of the slots
//              | small areas          |                                     |
//              v                      v                                     v
//         +-------------------+                         +--------+--------+--------+--------+
//         | small 0 | small 1 |                         | slot 0 | slot 1 | slot 2 | slot 3 |
//         +-------------------+                         +--------+--------+--------+--------+
//         staging blocks, from pools of the rank
//
// Vocabulary. An *announcement* describes one call: its sequence number, its fingerprint, the offset of its small areas
// and, up to 40 bytes, its data, all in one cache line. Calls use the announcements in turn, and also the two *small*
// areas, which hold the data of medium calls. *Finished* is the last call up to which this rank has found the calls of
// all members equal, and has read their data. A rank announces call n+16, in the place of call n, once all members have
// finished call n. Calls that use more than their announcement are announced only when this rank has finished the call
// before: then all members have announced that, so all have completed the one before it, and two areas are enough. A
// *slot* holds one chunk of a large array. *Progress* counts, over the lifetime of the group, the steps that this rank
// has finished in its slots; it never decreases. A group leases a *staging block* only while it needs one
// (transport/staging_pool.hpp), so a thousand groups take about two megabytes on each rank, and on a leader about as
// much for each member of another host that it represents.
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
// How many calls a rank that receives no data may be ahead of the others. The more, the less often ranks that share a
// core have to be switched.
inline constexpr uint64_t kAnnouncements = 16;
inline constexpr int kSlots = 4;

struct alignas(64) Announcement {
  std::atomic<uint64_t> sequence;
  uint64_t fingerprint;
  uint64_t small;  // offset in the arena of this call's small areas; 0 when it has none
  std::byte payload[kInlinePayload];
};
static_assert(sizeof(Announcement) == 64);

enum class MemberState : uint32_t {
  kPresent,
  kLeft,    // in order; takes part in no call after the last one that it announced
  kFailed,  // `failure` says why
};

struct GroupMemory {
  Announcement announcements[kAnnouncements];
  alignas(64) Descriptor descriptors[kAnnouncements];
  alignas(64) std::atomic<uint64_t> progress;
  uint64_t slots[2];                           // offsets in the arena of the slots of calls, in turn
  alignas(64) std::atomic<uint64_t> finished;  // release: what this rank read up to that call it has read
  alignas(64) std::atomic<MemberState> state;  // release-stored after the two fields below
  FailureHead failure;
  uint64_t failure_details;  // offset in the arena; 0 where there was no memory for them
  // The last call that this rank has abandoned; stored before the call's arrays are returned to their user. Until then,
  // and until all have acknowledged (progress), the arrays of a call are exposed: a rank that has read them in place
  // checks this field afterwards.
  std::atomic<uint64_t> abandoned;
  // Of the leader of a host in a group that spans hosts: offset of the memory in which it announces the calls of the
  // members on other hosts; release-stored, 0 until it is made. See collectives/relay.hpp.
  std::atomic<uint64_t> proxies;
};

// The sizes of group memory and staging blocks; equal on all members.
struct GroupLayout {
  size_t small_bytes = 16 * 1024;
  size_t slot_bytes = 384 * 1024;
  size_t chunk_bytes = 256 * 1024;  // at most a slot; two ranks that exchange halves use two whole slots

  // Group memory ends with one byte for each member, which that member sets when it has left and reads no more.
  static size_t memory_bytes(size_t members) { return sizeof(GroupMemory) + members; }
  size_t small_block_bytes() const { return 2 * small_bytes; }
  size_t slots_block_bytes() const { return kSlots * slot_bytes; }
};
static_assert(sizeof(GroupMemory) % 64 == 0);

// One member's group memory, as this process sees it.
class GroupMemoryView {
 public:
  GroupMemoryView() = default;  // none yet
  // Throws std::out_of_range when `offset` is no valid offset of group memory.
  GroupMemoryView(const Arena& arena, uint64_t offset, size_t members, const GroupLayout& layout)
      : arena_(&arena), base_(arena.at_line(offset, GroupLayout::memory_bytes(members))), layout_(layout) {}

  explicit operator bool() const { return base_ != nullptr; }
  const Arena& arena() const { return *arena_; }
  GroupMemory& memory() const { return *reinterpret_cast<GroupMemory*>(base_); }
  Announcement& announcement(uint64_t sequence) const { return memory().announcements[sequence % kAnnouncements]; }
  Descriptor& descriptor(uint64_t sequence) const { return memory().descriptors[sequence % kAnnouncements]; }
  // Release-stored by that member, once, when it has left.
  std::atomic<uint8_t>& departed(int member) const {
    return reinterpret_cast<std::atomic<uint8_t>*>(base_ + sizeof(GroupMemory))[member];
  }
  // Called by the owner: set the offset of its small areas before it announces the call, and the offset of its slots
  // before it publishes progress in the call, which may be before it announces the call.
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
  // The address of a call's data: inside the announcement if it fits, else in the small area.
  std::byte* payload(uint64_t sequence, size_t bytes) const {
    return bytes <= kInlinePayload ? announcement(sequence).payload : small(sequence);
  }

 private:
  const Arena* arena_ = nullptr;
  std::byte* base_ = nullptr;
  GroupLayout layout_{};
};

}  // namespace procgroup
