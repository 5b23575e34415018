// The table of element types, and the one function that combines elements.
//
// Vocabulary: a *source* is one rank's elements; sources are given in rank order and combined lower
// rank first, so that every rank that combines the same sources gets the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "dtype/reduce_ops.hpp"

namespace procgroup {

enum class Dtype : uint8_t {
  kBool,
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kFloat8E4m3fn,  // the float8 types are moved, never reduced
  kFloat8E4m3fnuz,
  kFloat8E5m2,
  kFloat8E5m2fnuz,
  kFloat8E8m0fnu,
};
inline constexpr int kDtypes = 20;

// What a dtype is, and the numbers by which other libraries know it.
struct DtypeRow {
  const char* name;  // NumPy's: "float32", "bfloat16"
  size_t bytes;
  unsigned kind;          // as in ReduceOpRow::takes
  uint8_t dlpack;         // the type code of DLPack
  int xla;                // xla/ffi/api/c_api.h
  int nccl = kNotInNccl;  // ncclDataType_t, of those that NCCL reduces
};

// By Dtype.
inline constexpr std::array<DtypeRow, kDtypes> kDtypeTable = {{
    {"bool", 1, kBools, 6, 1},
    {"int8", 1, kIntegers, 0, 2, 0},
    {"uint8", 1, kIntegers, 1, 6, 1},
    {"int16", 2, kIntegers, 0, 3},
    {"uint16", 2, kIntegers, 1, 7},
    {"int32", 4, kIntegers, 0, 4, 2},
    {"uint32", 4, kIntegers, 1, 8, 3},
    {"int64", 8, kIntegers, 0, 5, 4},
    {"uint64", 8, kIntegers, 1, 9, 5},
    {"float16", 2, kFloats, 2, 10, 6},
    {"bfloat16", 2, kFloats, 4, 16, 9},
    {"float32", 4, kFloats, 2, 11, 7},
    {"float64", 8, kFloats, 2, 12, 8},
    {"complex64", 8, kComplexes, 5, 15},
    {"complex128", 16, kComplexes, 5, 18},
    {"float8_e4m3fn", 1, kOpaque, 10, 20},
    {"float8_e4m3fnuz", 1, kOpaque, 11, 25},
    {"float8_e5m2", 1, kOpaque, 12, 19},
    {"float8_e5m2fnuz", 1, kOpaque, 13, 24},
    {"float8_e8m0fnu", 1, kOpaque, 14, 33},
}};

constexpr const DtypeRow& row_of(Dtype dtype) { return kDtypeTable[static_cast<size_t>(dtype)]; }
constexpr size_t dtype_size(Dtype dtype) { return row_of(dtype).bytes; }
constexpr const char* dtype_name(Dtype dtype) { return row_of(dtype).name; }
// Floating point or complex.
constexpr bool is_inexact(Dtype dtype) { return dtype >= Dtype::kFloat16; }
constexpr const char* reduce_op_name(ReduceOp op) { return row_of(op).name; }

// The dtype whose row matches; nothing where none does.
template <class Matches>
constexpr std::optional<Dtype> find_dtype(Matches matches) {
  for (size_t number = 0; number < kDtypes; ++number)
    if (matches(kDtypeTable[number])) return static_cast<Dtype>(number);
  return std::nullopt;
}
constexpr std::optional<Dtype> dtype_named(std::string_view name) {
  return find_dtype([name](const DtypeRow& row) { return name == row.name; });
}

// Whether `op` means something on `dtype`: nothing does on float8.
constexpr bool supports(ReduceOp op, Dtype dtype) { return (row_of(op).takes & row_of(dtype).kind) != 0; }
// The op that combines elements of a dtype where `op` is asked for and they are prepared; it has kernels.
constexpr ReduceOp combining(ReduceOp op, Dtype dtype) {
  const ReduceOp combines = row_of(op).combines;
  return dtype == Dtype::kBool ? row_of(combines).on_bools : combines;
}

// out[i] = sources[0][i] op sources[1][i] op ... for i < count, of prepared elements; AVG divides the sum by
// `source_count`. One source is copied.
// `out` may be the same address as any source; otherwise out and sources do not overlap.
// float16 and bfloat16 are accumulated in float32 and rounded once. MIN and MAX: a NaN in any source
// gives NaN; -0.0 counts as smaller than +0.0. bool: SUM, MAX, BOR are "or"; PRODUCT, MIN, BAND "and".
// Integer sums and products wrap; AVG of integers is the exact sum (it does not wrap), divided and truncated toward
// zero. Vectorised; the instruction set is chosen at run time.
void reduce(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count, size_t count);

// What reduce() calls where there are at least two sources. Throws std::invalid_argument unless supports(op, dtype).
using Kernel = void (*)(void* out, const void* const* sources, int source_count, size_t count);
Kernel reduction_kernel(Dtype dtype, ReduceOp op);

}  // namespace procgroup
