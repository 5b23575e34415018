// Scatter-gather lists: an array of bytes in several blocks of memory, which are sent without copying them together.
#pragma once

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

// Copy the array's bytes in the range of `bytes` bytes from `offset` on.
void copy_iovecs(std::byte* to, std::span<const Iovec> iovecs, size_t offset, size_t bytes, CopyFunction copy);

// The contiguous bytes from `offset` on; empty where no iovec has that offset.
std::span<const std::byte> contiguous_run(std::span<const Iovec> iovecs, size_t offset);

}  // namespace procgroup
