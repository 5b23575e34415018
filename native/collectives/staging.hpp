// The staging blocks of one group on this rank: where its calls copy in what does not fit in a line.
#pragma once

#include <vector>

#include "transport/group_memory.hpp"
#include "transport/staging_pool.hpp"

namespace procgroup {

class Staging {
 public:
  Staging(StagingPool& small, StagingPool& slots, const std::vector<GroupMemoryView>& members, int rank)
      : small_(small, are_done(members, rank)),
        slots_(slots, are_done(members, rank)),
        mine_(members[static_cast<size_t>(rank)]) {}

  // Before call `sequence` is announced: name the small areas that it copies in in, if it needs them, in its line.
  void begin(uint64_t sequence, bool needs_small) {
    mine_.place_small(sequence, needs_small ? small_.begin(sequence) : 0);
  }
  // When all have announced the call before, and before this rank publishes progress in this one: have slots.
  void take_slots(uint64_t sequence) { mine_.place_slots(sequence, slots_.begin(sequence)); }
  // This rank has read all that it reads of others in call `sequence`. After a failed call it may be left out.
  void end(uint64_t sequence) {
    mine_.memory().finished.store(sequence, std::memory_order_release);
    small_.end();
    slots_.end();
  }
  // The group ends. Offsets of the blocks that are still its own, which peers may be reading; 0 for none.
  uint64_t surrender_small() { return small_.surrender(); }
  uint64_t surrender_slots() { return slots_.surrender(); }

 private:
  static std::function<bool(uint64_t)> are_done(const std::vector<GroupMemoryView>& members, int rank) {
    return [members, rank](uint64_t sequence) {
      for (size_t member = 0; member < members.size(); ++member) {
        if (static_cast<int>(member) == rank) continue;
        if (members[member].memory().finished.load(std::memory_order_acquire) < sequence) return false;
      }
      return true;
    };
  }

  StagingPool::Lease small_;
  StagingPool::Lease slots_;
  const GroupMemoryView mine_;
};

}  // namespace procgroup
