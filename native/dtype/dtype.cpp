#include "dtype/dtype.hpp"

namespace procgroup {

namespace {

constexpr unsigned kOpaque = 0;  // moved, never reduced

struct DtypeFacts {
  const char* name;
  size_t size;
  unsigned kind;
};

// In the order of Dtype.
constexpr DtypeFacts kFacts[kDtypes] = {
    {"bool", 1, kBools},
    {"int8", 1, kIntegers},
    {"uint8", 1, kIntegers},
    {"int16", 2, kIntegers},
    {"uint16", 2, kIntegers},
    {"int32", 4, kIntegers},
    {"uint32", 4, kIntegers},
    {"int64", 8, kIntegers},
    {"uint64", 8, kIntegers},
    {"float16", 2, kFloats},
    {"bfloat16", 2, kFloats},
    {"float32", 4, kFloats},
    {"float64", 8, kFloats},
    {"complex64", 8, kComplexes},
    {"complex128", 16, kComplexes},
    {"float8_e4m3fn", 1, kOpaque},
    {"float8_e4m3fnuz", 1, kOpaque},
    {"float8_e5m2", 1, kOpaque},
    {"float8_e5m2fnuz", 1, kOpaque},
    {"float8_e8m0fnu", 1, kOpaque},
};

const DtypeFacts& facts(Dtype dtype) { return kFacts[static_cast<int>(dtype)]; }

}  // namespace

size_t dtype_size(Dtype dtype) { return facts(dtype).size; }

const char* dtype_name(Dtype dtype) { return facts(dtype).name; }

bool supports(ReduceOp op, Dtype dtype) { return (row_of(op).takes & facts(dtype).kind) != 0; }

}  // namespace procgroup
