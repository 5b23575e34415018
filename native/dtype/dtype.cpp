#include "dtype/dtype.hpp"

namespace procgroup {

namespace {

struct DtypeFacts {
  const char* name;
  size_t size;
  bool floating;
};

// In the order of Dtype.
constexpr DtypeFacts kFacts[kDtypes] = {
    {"bool", 1, false},    {"int8", 1, false},   {"uint8", 1, false},  {"int16", 2, false},  {"uint16", 2, false},
    {"int32", 4, false},   {"uint32", 4, false}, {"int64", 8, false},  {"uint64", 8, false}, {"float16", 2, true},
    {"bfloat16", 2, true}, {"float32", 4, true}, {"float64", 8, true},
};

constexpr const char* kOpNames[kReduceOps] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

const DtypeFacts& facts(Dtype dtype) { return kFacts[static_cast<int>(dtype)]; }

}  // namespace

size_t dtype_size(Dtype dtype) { return facts(dtype).size; }

const char* dtype_name(Dtype dtype) { return facts(dtype).name; }

const char* reduce_op_name(ReduceOp op) { return kOpNames[static_cast<int>(op)]; }

bool supports(ReduceOp op, Dtype dtype) {
  switch (op) {
    case ReduceOp::kAvg:
      return facts(dtype).floating;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !facts(dtype).floating;
    default:
      return true;
  }
}

}  // namespace procgroup
