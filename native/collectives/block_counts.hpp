// Which part of a call's elements each rank has for each other.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// The number of elements that group rank `from` has for group rank `to`, if every rank knows it; 0 if only these two
// do.
inline uint64_t block_count(const Request& request, int from, int to) {
  const Descriptor& call = request.descriptor;
  const OperationRow& row = row_of(call.op);
  if (row.sizes == Sizes::kPerPair) return 0;
  if (row.givers == Ranks::kNone || (row.givers == Ranks::kRoot && from != call.root)) return 0;
  if (row.takers == Ranks::kRoot && to != call.root) return 0;
  if (row.sources == Sources::kLowerAndOwn && from > to) return 0;
  if (row.sources == Sources::kLower && from >= to) return 0;
  if (call.splits == 0 || row.sizes == Sizes::kEqual) return call.count;
  return row.output == Arrays::kBlocks ? request.outputs[static_cast<size_t>(from)].count
                                       : request.inputs[static_cast<size_t>(to)].count;
}

// How many elements this rank has, in an operation without input blocks.
inline uint64_t input_count(const Request& request, int rank) {
  const Descriptor& call = request.descriptor;
  const bool differs = call.splits != 0 && row_of(call.op).sizes == Sizes::kPerRank;
  return differs ? request.outputs[static_cast<size_t>(rank)].count : call.count;
}

}  // namespace procgroup
