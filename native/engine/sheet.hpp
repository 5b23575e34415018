// What a rank shows the others about its arrays, beside the announcement of a call that is not small.
//
//     small area of this call:  | what it lends, and reads | inputs, one entry per rank | outputs, one per rank | data
//
// A call without pieces has its array in entry 0. Data is that of a small all_to_all. A rank writes its sheet before it
// announces the call; the others read it after that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/peer_memory.hpp"

namespace procgroup {

struct SheetEntry {
  RemotePlace place;
  uint64_t count;  // elements
};

// No bools: another rank may write any byte there.
struct SheetHead {
  uint8_t in_arena;          // everything that others would read lies in this rank's arena, or there is nothing
  uint8_t lends;             // the kernel can read it, wherever it lies
  uint8_t reads_everything;  // this rank can read the arrays of all others, wherever they lie
};

class Sheet {
 public:
  Sheet(std::byte* small, int size) : base_(small), size_(static_cast<size_t>(size)) {}

  static size_t bytes(int size) {
    const size_t used = sizeof(SheetHead) + alignof(SheetEntry) + 2 * static_cast<size_t>(size) * sizeof(SheetEntry);
    return (used + 63) / 64 * 64;
  }

  SheetHead& head() const { return *reinterpret_cast<SheetHead*>(base_); }
  SheetEntry& input(int piece) const { return entries()[piece]; }
  SheetEntry& output(int piece) const { return entries()[static_cast<size_t>(piece) + size_]; }
  std::byte* data() const { return base_ + bytes(static_cast<int>(size_)); }

 private:
  SheetEntry* entries() const { return reinterpret_cast<SheetEntry*>(base_ + alignof(SheetEntry)); }
  static_assert(sizeof(SheetHead) <= alignof(SheetEntry));

  std::byte* base_;
  size_t size_;
};

}  // namespace procgroup
