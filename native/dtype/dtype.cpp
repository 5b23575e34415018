#include "dtype/dtype.hpp"

namespace procgroup {

namespace {

enum class Kind : uint8_t {
  kIntegral,
  kFloating,
  kComplex,
  kOpaque,  // moved, never reduced
};

struct DtypeFacts {
  const char* name;
  size_t size;
  Kind kind;
};

// In the order of Dtype.
constexpr DtypeFacts kFacts[kDtypes] = {
    {"bool", 1, Kind::kIntegral},          {"int8", 1, Kind::kIntegral},          {"uint8", 1, Kind::kIntegral},
    {"int16", 2, Kind::kIntegral},         {"uint16", 2, Kind::kIntegral},        {"int32", 4, Kind::kIntegral},
    {"uint32", 4, Kind::kIntegral},        {"int64", 8, Kind::kIntegral},         {"uint64", 8, Kind::kIntegral},
    {"float16", 2, Kind::kFloating},       {"bfloat16", 2, Kind::kFloating},      {"float32", 4, Kind::kFloating},
    {"float64", 8, Kind::kFloating},       {"complex64", 8, Kind::kComplex},      {"complex128", 16, Kind::kComplex},
    {"float8_e4m3fn", 1, Kind::kOpaque},   {"float8_e4m3fnuz", 1, Kind::kOpaque}, {"float8_e5m2", 1, Kind::kOpaque},
    {"float8_e5m2fnuz", 1, Kind::kOpaque}, {"float8_e8m0fnu", 1, Kind::kOpaque},
};

constexpr const char* kOpNames[kReduceOps] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                              "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

const DtypeFacts& facts(Dtype dtype) { return kFacts[static_cast<int>(dtype)]; }

}  // namespace

size_t dtype_size(Dtype dtype) { return facts(dtype).size; }

const char* dtype_name(Dtype dtype) { return facts(dtype).name; }

const char* reduce_op_name(ReduceOp op) { return kOpNames[static_cast<int>(op)]; }

bool supports(ReduceOp op, Dtype dtype) {
  const Kind kind = facts(dtype).kind;
  if (kind == Kind::kOpaque) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
      return dtype != Dtype::kBool;
    case ReduceOp::kPremulSum:
      return kind != Kind::kIntegral;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return kind != Kind::kComplex;
    default:
      return kind == Kind::kIntegral;
  }
}

}  // namespace procgroup
