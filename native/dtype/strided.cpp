#include "dtype/strided.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <ranges>
#include <span>

namespace procgroup {
namespace {

struct Dimension {
  ptrdiff_t length;
  ptrdiff_t stride;
  ptrdiff_t packed = 0;  // its stride where the elements are packed
};

ptrdiff_t distance(const Dimension& dimension) { return std::abs(dimension.stride); }

// The same elements in the same order with as few dimensions as possible.
std::vector<Dimension> merged(const Strided& array) {
  std::vector<Dimension> dimensions;
  for (size_t index = 0; index < array.shape.size(); ++index) {
    const Dimension next{array.shape[index], array.strides[index]};
    if (next.length == 1) continue;
    if (!dimensions.empty() && dimensions.back().stride == next.stride * next.length)
      dimensions.back() = {dimensions.back().length * next.length, next.stride};
    else
      dimensions.push_back(next);
  }
  return dimensions;
}

// Contiguous runs of `bytes` bytes each; `outer` has the dimensions over which they repeat.
struct Runs {
  size_t bytes;
  std::vector<Dimension> outer;
};

Runs runs_of(const Strided& array) {
  Runs runs{array.element_bytes, merged(array)};
  if (!runs.outer.empty() && runs.outer.back().stride == static_cast<ptrdiff_t>(array.element_bytes)) {
    runs.bytes *= static_cast<size_t>(runs.outer.back().length);
    runs.outer.pop_back();
  }
  return runs;
}

// Call `visit(address, packed)` for each index into these dimensions, in C order.
template <class Visit>
void for_each_index(std::byte* address, std::byte* packed, std::span<const Dimension> dimensions, const Visit& visit) {
  if (dimensions.empty()) return visit(address, packed);
  const Dimension& first = dimensions.front();
  for (ptrdiff_t index = 0; index < first.length; ++index)
    for_each_index(address + index * first.stride, packed + index * first.packed, dimensions.subspan(1), visit);
}

// The size of a tile: its rows use the same cache lines. Lines 4 KiB apart, as in a matrix of 1024 floats a row, share
// one set of the first-level cache, which has 8 to 12 ways.
constexpr ptrdiff_t kTileRows = 16;
constexpr ptrdiff_t kTileColumns = 8;

// Rows of columns of runs. With a size that the compiler knows, kBytes if not zero, copies are single moves.
template <size_t kBytes, bool kPack>
void copy_plane(std::byte* strided, std::byte* packed, Dimension rows, Dimension columns, size_t bytes) {
  if constexpr (kBytes != 0) bytes = kBytes;
  const ptrdiff_t high = kTileRows;
  const ptrdiff_t wide = rows.length == 1 ? columns.length : kTileColumns;
  for (ptrdiff_t top = 0; top < rows.length; top += high)
    for (ptrdiff_t left = 0; left < columns.length; left += wide)
      for (ptrdiff_t row = top; row < std::min(top + high, rows.length); ++row)
        for (ptrdiff_t column = left; column < std::min(left + wide, columns.length); ++column) {
          std::byte* element = strided + row * rows.stride + column * columns.stride;
          std::byte* place = packed + row * rows.packed + column * columns.packed;
          std::memcpy(kPack ? place : element, kPack ? element : place, bytes);
        }
}

template <bool kPack>
auto plane_copier(size_t bytes) {
  switch (bytes) {
    case 1:
      return copy_plane<1, kPack>;
    case 2:
      return copy_plane<2, kPack>;
    case 4:
      return copy_plane<4, kPack>;
    case 8:
      return copy_plane<8, kPack>;
    case 16:
      return copy_plane<16, kPack>;
    default:
      return copy_plane<0, kPack>;
  }
}

template <bool kPack>
void copy(const Strided& array, std::byte* packed) {
  if (array.count() == 0) return;
  auto [bytes, outer] = runs_of(array);
  auto stride = static_cast<ptrdiff_t>(bytes);
  for (Dimension& dimension : std::views::reverse(outer)) {
    dimension.packed = stride;
    stride *= dimension.length;
  }
  Dimension rows{1, 0}, columns{1, 0};
  if (!outer.empty()) {
    columns = outer.back();
    outer.pop_back();
  }
  // As in a transposed matrix, the next elements in memory may be those of other rows.
  const auto nearest = std::ranges::min_element(outer, {}, distance);
  if (nearest != outer.end() && distance(*nearest) < distance(columns)) {
    rows = *nearest;
    outer.erase(nearest);
  }
  for_each_index(array.base, packed, outer,
                 [&, bytes = bytes, copy_one = plane_copier<kPack>(bytes)](std::byte* address, std::byte* place) {
                   copy_one(address, place, rows, columns, bytes);
                 });
}

std::vector<uintptr_t> sorted_begins(const Strided& array, const Runs& runs) {
  std::vector<uintptr_t> begins;
  begins.reserve(array.count() * array.element_bytes / runs.bytes);
  for_each_index(array.base, nullptr, runs.outer,
                 [&](std::byte* address, std::byte*) { begins.push_back(reinterpret_cast<uintptr_t>(address)); });
  std::ranges::sort(begins);
  return begins;
}

struct Extent {
  uintptr_t begin;
  uintptr_t end;
};

Extent extent_of(const Strided& array) {
  Extent extent{reinterpret_cast<uintptr_t>(array.base), reinterpret_cast<uintptr_t>(array.base)};
  for (size_t index = 0; index < array.shape.size(); ++index) {
    const ptrdiff_t reach = array.strides[index] * (array.shape[index] - 1);
    (reach < 0 ? extent.begin : extent.end) += static_cast<uintptr_t>(reach);
  }
  extent.end += array.element_bytes;
  return extent;
}

// Whether the elements of the two arrays have different residues modulo a common divisor of the strides, as different
// columns of one matrix do.
bool apart_by_residue(const Strided& left, const Runs& left_runs, const Strided& right, const Runs& right_runs) {
  uintptr_t divisor = 0;
  for (const Runs* runs : {&left_runs, &right_runs})
    for (const Dimension& dimension : runs->outer)
      divisor = std::gcd(divisor, static_cast<uintptr_t>(std::abs(dimension.stride)));
  if (divisor == 0) return false;
  const uintptr_t distance =
      (reinterpret_cast<uintptr_t>(right.base) % divisor + divisor - reinterpret_cast<uintptr_t>(left.base) % divisor) %
      divisor;
  return distance >= left_runs.bytes && distance + right_runs.bytes <= divisor;
}

}  // namespace

size_t Strided::count() const {
  size_t count = 1;
  for (const ptrdiff_t length : shape) count *= static_cast<size_t>(length);
  return count;
}

bool Strided::is_contiguous() const { return count() == 0 || runs_of(*this).outer.empty(); }

bool Strided::fills_a_block() const {
  std::vector<size_t> dimensions;
  for (size_t index = 0; index < shape.size(); ++index)
    if (shape[index] != 1) dimensions.push_back(index);
  std::ranges::sort(dimensions, {}, [&](size_t index) { return strides[index]; });
  auto expected = static_cast<ptrdiff_t>(element_bytes);
  for (const size_t index : dimensions) {
    if (strides[index] != expected) return false;
    expected *= shape[index];
  }
  return true;
}

uint64_t Strided::order() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  for (size_t index = 0; index < shape.size(); ++index)
    for (const ptrdiff_t word : {shape[index], strides[index]}) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
      hash ^= hash >> 32;
    }
  return hash | 1;
}

void Strided::pack(void* to) const { copy<true>(*this, static_cast<std::byte*>(to)); }

void Strided::unpack(const void* from) const {
  copy<false>(*this, static_cast<std::byte*>(const_cast<void*>(from)));  // only read
}

bool Strided::overlaps_itself() const {
  if (count() <= 1) return false;
  const Runs runs = runs_of(*this);
  std::vector<Dimension> nested = runs.outer;
  std::ranges::sort(nested, {}, [](const Dimension& dimension) { return std::abs(dimension.stride); });
  // Usual layouts nest: each stride reaches beyond all that the smaller ones cover.
  size_t covered = runs.bytes;
  bool nests = true;
  for (const Dimension& dimension : nested) {
    const auto stride = static_cast<size_t>(std::abs(dimension.stride));
    if (stride == 0) return true;
    nests = nests && stride >= covered;
    covered += stride * static_cast<size_t>(dimension.length - 1);
  }
  if (nests) return false;
  const std::vector<uintptr_t> begins = sorted_begins(*this, runs);
  for (size_t index = 1; index < begins.size(); ++index)
    if (begins[index] - begins[index - 1] < runs.bytes) return true;
  return false;
}

bool overlap(const Strided& left, const Strided& right) {
  if (left.count() == 0 || right.count() == 0) return false;
  const Extent one = extent_of(left);
  const Extent two = extent_of(right);
  if (one.end <= two.begin || two.end <= one.begin) return false;
  const Runs left_runs = runs_of(left);
  const Runs right_runs = runs_of(right);
  if (apart_by_residue(left, left_runs, right, right_runs)) return false;
  const std::vector<uintptr_t> lefts = sorted_begins(left, left_runs);
  const std::vector<uintptr_t> rights = sorted_begins(right, right_runs);
  for (size_t i = 0, j = 0; i < lefts.size() && j < rights.size();) {
    if (lefts[i] + left_runs.bytes <= rights[j])
      ++i;
    else if (rights[j] + right_runs.bytes <= lefts[i])
      ++j;
    else
      return true;
  }
  return false;
}

bool any_overlap(const std::vector<Strided>& arrays) {
  struct Placed {
    Extent extent;
    const Strided* array;
  };
  std::vector<Placed> placed;
  placed.reserve(arrays.size());
  for (const Strided& array : arrays)
    if (array.count() != 0) placed.push_back({extent_of(array), &array});
  std::ranges::sort(placed, {}, [](const Placed& one) { return one.extent.begin; });
  for (size_t index = 0; index < placed.size(); ++index)
    for (size_t next = index + 1; next < placed.size() && placed[next].extent.begin < placed[index].extent.end; ++next)
      if (overlap(*placed[index].array, *placed[next].array)) return true;
  return false;
}

}  // namespace procgroup
