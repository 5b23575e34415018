// Which part of a call's elements each rank has for each other.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// How many elements group rank `from` has for group rank `to`, as every rank knows it. Not for all_to_all, in which
// only these two know.
inline uint64_t block_count(const Request& request, int from, int to) {
  const Descriptor& call = request.descriptor;
  const auto block = [&](const std::vector<Block>& blocks, int rank) -> uint64_t {
    return call.splits == 0 ? call.count : blocks[static_cast<size_t>(rank)].count;
  };
  switch (call.op) {
    case OpKind::kBroadcast:
    case OpKind::kScatter:
      return from == call.root ? call.count : 0;
    case OpKind::kReduce:
    case OpKind::kGather:
      return to == call.root ? call.count : 0;
    case OpKind::kAllReduce:
      return call.count;
    case OpKind::kAllGather:
      return block(request.outputs, from);
    case OpKind::kReduceScatter:
      return block(request.inputs, to);
    default:
      return 0;
  }
}

// Where this rank has what is for group rank `to`.
inline const void* block_for(const Request& request, int to) {
  return request.inputs.empty() ? request.input : request.inputs[static_cast<size_t>(to)].data;
}

}  // namespace procgroup
