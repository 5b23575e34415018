#include "base/iovec.hpp"

#include <algorithm>

namespace procgroup {

namespace {

size_t end_of(const Iovec& iovec) { return iovec.offset + iovec.bytes; }

}  // namespace

void copy_iovecs(std::byte* to, std::span<const Iovec> iovecs, size_t offset, size_t bytes, CopyFunction copy) {
  const size_t end = offset + bytes;
  for (auto iovec = std::ranges::upper_bound(iovecs, offset, {}, end_of); iovec != iovecs.end() && iovec->offset < end;
       ++iovec) {
    const size_t first = std::max(offset, iovec->offset);
    const size_t last = std::min(end, end_of(*iovec));
    copy(to + (first - offset), iovec->data + (first - iovec->offset), last - first);
  }
}

std::span<const std::byte> contiguous_run(std::span<const Iovec> iovecs, size_t offset) {
  const auto iovec = std::ranges::upper_bound(iovecs, offset, {}, end_of);
  if (iovec == iovecs.end() || iovec->offset > offset) return {};
  return {iovec->data + (offset - iovec->offset), end_of(*iovec) - offset};
}

}  // namespace procgroup
