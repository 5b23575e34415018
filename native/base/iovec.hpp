// Scatter-gather lists: an array of bytes in several blocks of memory, which are sent without copying them together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/copy.hpp"

namespace procgroup {

// Bytes of the array from `offset` on. Iovecs are in the order of their offsets and do not overlap; bytes between two
// of them, left for alignment, have no value and are not copied.
struct Iovec {
  size_t offset = 0;
  size_t bytes = 0;
  const std::byte* data = nullptr;
};

inline size_t end_of(const Iovec& iovec) { return iovec.offset + iovec.bytes; }

// Copy the array's bytes in the range of `bytes` bytes from `offset` on.
inline void copy_iovecs(std::byte* to, std::span<const Iovec> iovecs, size_t offset, size_t bytes, CopyFunction copy) {
  const size_t end = offset + bytes;
  for (auto iovec = std::ranges::upper_bound(iovecs, offset, {}, end_of); iovec != iovecs.end() && iovec->offset < end;
       ++iovec) {
    const size_t first = std::max(offset, iovec->offset);
    const size_t last = std::min(end, end_of(*iovec));
    copy(to + (first - offset), iovec->data + (first - iovec->offset), last - first);
  }
}

// The contiguous bytes from `offset` on; empty where no iovec has that offset.
inline std::span<const std::byte> contiguous_run(std::span<const Iovec> iovecs, size_t offset) {
  const auto iovec = std::ranges::upper_bound(iovecs, offset, {}, end_of);
  if (iovec == iovecs.end() || iovec->offset > offset) return {};
  return {iovec->data + (offset - iovec->offset), end_of(*iovec) - offset};
}

}  // namespace procgroup
