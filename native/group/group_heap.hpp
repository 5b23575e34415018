// Memory of the groups of one rank in its arena, and its reuse after they end.
//
// A group that ends is *retired*: its memory is reused only when no peer can be reading it any more, that is, when
// each has sent that it has left the group, too, or its process has ended.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/cells.hpp"
#include "transport/group_memory.hpp"
#include "transport/staging_pool.hpp"

namespace procgroup {

// Groups that are used in turn need a block each; beyond these, idle blocks are reused.
inline constexpr size_t kKeptSmallBlocks = 32;  // of one member
inline constexpr size_t kKeptSlotsBlocks = 3;

class GroupHeap {
 public:
  explicit GroupHeap(Arena& arena) : arena_(arena), cells_(arena) {}
  GroupHeap(const GroupHeap&) = delete;

  struct Retired {
    std::vector<std::pair<uint64_t, size_t>> memory;  // offsets and bytes of what take() returned
    std::vector<std::pair<StagingPool*, uint64_t>> blocks;
    std::function<bool()> is_unread;
  };

  // Zeroed group memory. Throws std::system_error when memory is refused.
  uint64_t take(size_t bytes) {
    sweep();
    return cells_.take(bytes);
  }
  // Bytes of any kind, such as a failure record. Throws std::system_error when memory is refused.
  std::byte* at(uint64_t offset, size_t bytes) const { return arena_.at(offset, bytes); }
  // Of blocks with the small areas of so many members.
  StagingPool& small_pool(const GroupLayout& layout, size_t members) {
    return pool(members * layout.small_block_bytes(), std::max<size_t>(1, kKeptSmallBlocks / members));
  }
  StagingPool& slots_pool(const GroupLayout& layout) { return pool(layout.slots_block_bytes(), kKeptSlotsBlocks); }

  void retire(Retired group) {
    {
      const std::lock_guard lock(mutex_);
      retired_.push_back(std::move(group));
    }
    sweep();
  }
  // Reuse memory that no peer reads any more; return how many retired groups are still read.
  size_t sweep() {
    const std::lock_guard lock(mutex_);
    std::erase_if(retired_, [this](const Retired& group) {
      if (!group.is_unread()) return false;
      for (const auto& [offset, bytes] : group.memory) cells_.give_back(offset, bytes);
      for (const auto& [from, block] : group.blocks) from->give_back(block);
      return true;
    });
    return retired_.size();
  }

 private:
  StagingPool& pool(size_t block_bytes, size_t kept_blocks) {
    const std::lock_guard lock(mutex_);
    return pools_.try_emplace({block_bytes, kept_blocks}, arena_, block_bytes, kept_blocks).first->second;
  }

  Arena& arena_;
  Cells cells_;
  std::mutex mutex_;                                        // guards what follows; taken before a pool's
  std::map<std::pair<size_t, size_t>, StagingPool> pools_;  // by the bytes of a block and how many are kept
  std::vector<Retired> retired_;
};

}  // namespace procgroup
