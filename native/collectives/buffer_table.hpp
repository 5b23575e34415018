// The buffer table: a rank's arrays and their sizes, beside the announcement of a call that is not small.
//
//     small area of this call:  | exposed, readable arrays | inputs, one entry per rank | outputs, one per rank |
//     data
//
// A call without blocks has its array in entry 0. Data is that of a small all_to_all. A rank writes its buffer table
// before it announces the call; the others read it after that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/peer_memory.hpp"

namespace procgroup {

struct BufferEntry {
  RemotePlace place;
  uint64_t count;  // elements, as Block::announced has them
};

// No bools: another rank may write any byte there.
struct BufferTableHeader {
  uint8_t in_arena;          // all that others read is in this rank's arena, or there is nothing to read
  uint8_t exposes;           // the kernel can read the arrays, wherever they are
  uint8_t reads_everything;  // this rank can read the arrays of all others, wherever they are
};

class BufferTable {
 public:
  BufferTable(std::byte* small, int size) : base_(small), size_(static_cast<size_t>(size)) {}

  static size_t bytes(int size) {
    const size_t entries = 2 * static_cast<size_t>(size) * sizeof(BufferEntry);
    return round_up(sizeof(BufferTableHeader) + alignof(BufferEntry) + entries, kArenaLine);
  }

  BufferTableHeader& head() const { return *reinterpret_cast<BufferTableHeader*>(base_); }
  BufferEntry& input(int block) const { return entries()[block]; }
  BufferEntry& output(int block) const { return entries()[static_cast<size_t>(block) + size_]; }
  std::byte* data() const { return base_ + bytes(static_cast<int>(size_)); }

 private:
  BufferEntry* entries() const { return reinterpret_cast<BufferEntry*>(base_ + alignof(BufferEntry)); }
  static_assert(sizeof(BufferTableHeader) <= alignof(BufferEntry));

  std::byte* base_;
  size_t size_;
};

}  // namespace procgroup
