// Small blocks of an arena, such as group memories: a page for each would waste most of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "transport/arena.hpp"

namespace procgroup {

// Cells of a size that is given back are reused for that size; the arena keeps their memory.
class Cells {
 public:
  explicit Cells(Arena& arena) : arena_(arena) {}
  Cells(const Cells&) = delete;

  // Offset of `bytes` zeroed bytes, aligned to a cache line. Throws as Arena::allocate.
  uint64_t take(size_t bytes) {
    const size_t size = round_up(bytes, kArenaLine);
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t>& free = free_[size];
    if (free.empty()) return carve(size);
    const uint64_t offset = free.back();
    free.pop_back();
    std::memset(arena_.at(offset, size), 0, size);
    return offset;
  }
  void give_back(uint64_t offset, size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_[round_up(bytes, kArenaLine)].push_back(offset);
  }

 private:
  static constexpr size_t kChunkBytes = 64 * 1024;
  // A new chunk leaves the rest of the one before unused: at most this much.
  static constexpr size_t kLargestCarved = kChunkBytes / 4;

  uint64_t carve(size_t size) {
    if (size > kLargestCarved) return arena_.allocate(size);
    if (left_ < size) {
      left_ = kChunkBytes;
      chunk_ = arena_.allocate(left_);
    }
    const uint64_t offset = chunk_;
    chunk_ += size;
    left_ -= size;
    return offset;
  }

  Arena& arena_;
  std::mutex mutex_;  // guards what follows
  std::map<size_t, std::vector<uint64_t>> free_;
  uint64_t chunk_ = 0;  // the rest of the newest chunk
  size_t left_ = 0;
};

}  // namespace procgroup
