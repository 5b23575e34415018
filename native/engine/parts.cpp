#include "engine/parts.hpp"

#include <algorithm>

namespace procgroup {

namespace {

size_t end_of(const Part& part) { return part.offset + part.bytes; }

}  // namespace

void copy_parts(std::byte* to, std::span<const Part> parts, size_t offset, size_t bytes, CopyFunction copy) {
  const size_t end = offset + bytes;
  for (auto part = std::ranges::upper_bound(parts, offset, {}, end_of); part != parts.end() && part->offset < end;
       ++part) {
    const size_t first = std::max(offset, part->offset);
    const size_t last = std::min(end, end_of(*part));
    copy(to + (first - offset), part->data + (first - part->offset), last - first);
  }
}

std::span<const std::byte> run_of_parts(std::span<const Part> parts, size_t offset) {
  const auto part = std::ranges::upper_bound(parts, offset, {}, end_of);
  if (part == parts.end() || part->offset > offset) return {};
  return {part->data + (offset - part->offset), end_of(*part) - offset};
}

}  // namespace procgroup
