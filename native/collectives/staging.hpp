// The staging blocks of one group on this rank: its calls copy in data there that does not fit in a cache line.
//
// Where a leader represents the members of other hosts, its small areas and theirs are one block, so that they are
// leased, read and given back together (collectives/relay.hpp).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/group_memory.hpp"
#include "transport/staging_pool.hpp"

namespace procgroup {

class Staging {
 public:
  // `readers`: the memory of the other ranks of this host, which read what this rank copies in.
  Staging(StagingPool& small, StagingPool& slots, const GroupMemoryView& mine,
          const std::vector<GroupMemoryView>& readers)
      : small_(small, are_done(readers)), slots_(slots, are_done(readers)), mine_(mine) {}

  // Before call `sequence` is announced: write the offset of its small areas, if it needs them, into its announcement.
  void begin(uint64_t sequence, bool needs_small) {
    mine_.place_small(sequence, needs_small ? small_.begin(sequence) : 0);
  }
  // When all have announced the call before, and before this rank publishes progress in this one: have slots.
  void take_slots(uint64_t sequence) { mine_.place_slots(sequence, slots_.begin(sequence)); }
  // A call has completed on this rank. After a failed call it need not be called.
  void end() {
    small_.end();
    slots_.end();
  }
  // The group ends. The blocks that are still its own, which peers may be reading, with the pools that they are from.
  std::vector<std::pair<StagingPool*, uint64_t>> surrender() {
    std::vector<std::pair<StagingPool*, uint64_t>> blocks;
    for (StagingPool::Lease* lease : {&small_, &slots_})
      if (const uint64_t offset = lease->surrender(); offset != 0) blocks.emplace_back(&lease->pool(), offset);
    return blocks;
  }

 private:
  static std::function<bool(uint64_t)> are_done(const std::vector<GroupMemoryView>& readers) {
    return [readers](uint64_t sequence) {
      return std::ranges::all_of(readers, [sequence](const GroupMemoryView& reader) {
        return reader.memory().finished.load(std::memory_order_acquire) >= sequence;
      });
    };
  }

  StagingPool::Lease small_;
  StagingPool::Lease slots_;
  const GroupMemoryView mine_;
};

}  // namespace procgroup
