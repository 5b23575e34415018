// What one rank shows the other members of one group in its arena.
//
//     group memory of rank r
//     +---------+---------+-------------+----------+-------+---------+---------+------+------+------+------+
//     | line 0  | line 1  | descriptors | progress | state | small 0 | small 1 | slot | slot | slot | slot |
//     +---------+---------+-------------+----------+-------+---------+---------+------+------+------+------+
//
// Vocabulary. A *line* announces one call: its sequence number, its fingerprint and, up to 48 bytes, its
// data, all in one cache line. Calls use the two lines in turn (as they do the two *small* areas, which
// hold the data of medium calls). That is enough, because every call awaits the lines of all members:
// a rank that announces call n+2 has seen everybody announce n+1, so everybody is done with call n.
// A *slot* holds one chunk of a large array. *Progress* counts, over the group's whole life, what this
// rank has finished in its slots; it never goes back.
//
// Memory order. A line's `sequence` and `progress` are written last, sequentially consistent: as release,
// they publish everything written before; as part of the one total order, they make the writer's next
// look at `sleepers` safe (see Arena::wake). Readers load them sequentially consistent for the same reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/descriptor.hpp"

namespace procgroup {

inline constexpr size_t kLinePayload = 48;
inline constexpr int kSlots = 4;

struct alignas(64) CallLine {
  std::atomic<uint64_t> sequence;
  uint64_t fingerprint;
  std::byte payload[kLinePayload];
};
static_assert(sizeof(CallLine) == 64);

enum class MemberState : uint32_t {
  kPresent,
  kLeft,    // in order; takes part in no call after the last one that it announced
  kFailed,  // gave up; `reason`, `lost_rank` and `lost_pid` say why
};

inline constexpr size_t kReasonBytes = 320;

struct GroupMemory {
  CallLine lines[2];
  alignas(64) Descriptor descriptors[2];
  alignas(64) std::atomic<uint64_t> progress;
  alignas(64) std::atomic<MemberState> state;  // release-stored after the three fields below
  int32_t lost_rank;                           // group rank whose loss was the reason, or -1
  int64_t lost_pid;
  char reason[kReasonBytes];
};

// How large the areas behind GroupMemory are; equal on all members.
struct GroupLayout {
  size_t small_bytes = 16 * 1024;
  size_t slot_bytes = 384 * 1024;
  size_t chunk_bytes = 256 * 1024;  // at most a slot; two ranks that exchange halves use two whole slots

  size_t total() const { return sizeof(GroupMemory) + 2 * small_bytes + kSlots * slot_bytes; }
};
static_assert(sizeof(GroupMemory) % 64 == 0);

// One member's group memory, as this process sees it.
class GroupMemoryView {
 public:
  GroupMemoryView(std::byte* base, const GroupLayout& layout) : base_(base), layout_(layout) {}

  GroupMemory& memory() const { return *reinterpret_cast<GroupMemory*>(base_); }
  CallLine& line(uint64_t sequence) const { return memory().lines[sequence & 1]; }
  Descriptor& descriptor(uint64_t sequence) const { return memory().descriptors[sequence & 1]; }
  std::byte* small(uint64_t sequence) const {
    return base_ + sizeof(GroupMemory) + (sequence & 1) * layout_.small_bytes;
  }
  std::byte* slot(int index) const {
    return base_ + sizeof(GroupMemory) + 2 * layout_.small_bytes + static_cast<size_t>(index) * layout_.slot_bytes;
  }
  // Where a call's data lies when it fits beside its announcement.
  std::byte* payload(uint64_t sequence, size_t bytes) const {
    return bytes <= kLinePayload ? line(sequence).payload : small(sequence);
  }

 private:
  std::byte* base_;
  GroupLayout layout_;
};

}  // namespace procgroup
