// Small arrays that are reduced together, as one array: an exchange of all of them takes hardly longer than of one.
//
//   arrays   a0  a1  [ large ]  a2         calls   all_reduce of +----+----+----+   all_reduce of [ large ]
//                                                                | a0 | a1 | a2 |
//                                                                +----+----+----+
#pragma once

#include <cstddef>
#include <vector>

#include "ops/request.hpp"

namespace procgroup {

// Larger arrays are reduced in place: to copy them twice takes longer than a call of their own.
inline constexpr size_t kPackedArrayBytes = size_t{16} << 10;
// What one pack holds, and the memory that it takes.
inline constexpr size_t kPackBytes = size_t{256} << 10;

struct ReducedArray {
  Block block;
  Dtype dtype;
  ReduceOp op;
  double factor = 1.0;  // of PREMUL_SUM
};

// Which arrays go out together, by their places in the list: small ones of one dtype and op, and every large one alone;
// all of them alone, in their order, where some share memory. Otherwise nothing decides that may differ between ranks.
std::vector<std::vector<size_t>> assign_packs(const std::vector<ReducedArray>& arrays, bool share_memory);

// The same for arrays on a device, where none is copied: neighbours of one dtype and op go out together. A factor may
// differ between ranks, so an array that has one goes out alone.
std::vector<std::vector<size_t>> assign_neighbours(const std::vector<ReducedArray>& arrays);

// The all_reduce of arrays on a device, which are the request's inputs and outputs.
Request all_reduce_in_place(const std::vector<ReducedArray>& arrays);

// The all_reduce of one array, or of several of one dtype and op. Several, and what an op prepares, are copied into
// memory of the request's own right before the call reads them, and back when it went well; sizes that differ between
// ranks are a mismatch.
Request all_reduce_of(std::vector<ReducedArray> arrays);

}  // namespace procgroup
