// Arrays that are not contiguous in memory: columns, slices, transposed and reversed views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace procgroup {

// The addresses of an array's elements, in C order. Strides are in bytes and may be negative or zero.
struct Strided {
  std::byte* base = nullptr;  // of the first element
  size_t element_bytes = 1;
  std::vector<ptrdiff_t> shape;
  std::vector<ptrdiff_t> strides;

  size_t count() const;
  // Whether the elements are contiguous, so that `base` alone describes them.
  bool is_contiguous() const;
  // Whether the elements fill a block of memory that begins at `base`, in whatever order, as those of a transposed
  // array do; and a hash of that order, which is never zero.
  bool fills_a_block() const;
  uint64_t order() const;
  // Copy the elements to, or from, contiguous memory.
  void pack(void* to) const;
  void unpack(const void* from) const;
  // Whether two elements share a byte, as in a broadcast view.
  bool overlaps_itself() const;
};

// Whether an element of one shares a byte with an element of the other.
bool overlap(const Strided& left, const Strided& right);
// Whether any two of them do.
bool any_overlap(const std::vector<Strided>& arrays);

}  // namespace procgroup
