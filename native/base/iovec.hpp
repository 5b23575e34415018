// Scatter-gather lists: an array of bytes in several blocks of memory, which are sent without copying them together.
#pragma once

#include <cstddef>
#include <span>

#include "base/copy.hpp"

namespace procgroup {

// Bytes of the array from `offset` on. Parts come in the order of their offsets and do not overlap; what lies between
// two of them, so that the next begins where its elements need it, has no value and is not copied.
struct Iovec {
  size_t offset = 0;
  size_t bytes = 0;
  const std::byte* data = nullptr;
};

// Copy what the array has in the `bytes` bytes from `offset` on.
void copy_iovecs(std::byte* to, std::span<const Iovec> iovecs, size_t offset, size_t bytes, CopyFunction copy);

// The bytes from `offset` on that lie in one block: none where nothing lies.
std::span<const std::byte> contiguous_run(std::span<const Iovec> iovecs, size_t offset);

}  // namespace procgroup
