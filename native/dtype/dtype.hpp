// Element types, and the one function that combines elements.
//
// Vocabulary: a *source* is one rank's elements; sources are given in rank order and combined lower
// rank first, so that every rank that combines the same sources gets the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

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

size_t dtype_size(Dtype dtype);
// Floating point or complex.
constexpr bool is_inexact(Dtype dtype) { return dtype >= Dtype::kFloat16; }
const char* dtype_name(Dtype dtype);  // NumPy's name: "float32", "bfloat16"
constexpr const char* reduce_op_name(ReduceOp op) { return row_of(op).name; }

// Whether `op` means something on `dtype`: nothing does on float8.
bool supports(ReduceOp op, Dtype dtype);
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
