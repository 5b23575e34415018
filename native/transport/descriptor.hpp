// What one call is, in a fixed-size record that all ranks of the group must agree on.
#pragma once

#include <cstdint>
#include <string>

#include "dtype/dtype.hpp"

namespace procgroup {

enum class OpKind : uint8_t { kBarrier, kBroadcast, kReduce, kAllReduce, kAllGather, kSend, kRecv };

const char* op_name(OpKind op);

struct Descriptor {
  uint64_t group = 0;
  uint64_t sequence = 0;
  OpKind op = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint8_t pad = 0;
  int32_t root = -1;
  uint64_t count = 0;  // elements of one rank's array

  size_t bytes() const { return count * dtype_size(dtype); }
  // Equal on all ranks exactly when they made the same call (up to a 64-bit hash).
  uint64_t fingerprint() const;
  // For people: "all_reduce(SUM) of 1000 float32". Safe for what another rank wrote: it may name what does not exist.
  std::string describe() const;
};

}  // namespace procgroup
