#include "dtype/partial.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define PROCGROUP_KERNELS partials
#include "dtype/elements.hpp"

namespace procgroup {
namespace {

using partials::Bfloat16;
using partials::Float16;
using partials::Unaligned;

constexpr size_t kBlock = 1024;  // elements widened at a time: they stay in the first-level cache

bool is_half(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16; }

bool travels_wide(Dtype dtype, ReduceOp op) {
  return is_half(dtype) && (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct);
}

// The op that combines two partial results: an average is a sum until its end.
ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

template <class Element>
void widen_as(void* out, const void* elements, size_t count) {
  auto* to = static_cast<Unaligned<float>*>(out);
  const auto* from = static_cast<const Unaligned<uint16_t>*>(elements);
  for (size_t index = 0; index < count; ++index) to[index].value = Element::load(from[index].value);
}

template <class Element>
void narrow_as(void* out, const void* floats, size_t count) {
  auto* to = static_cast<Unaligned<uint16_t>*>(out);
  const auto* from = static_cast<const Unaligned<float>*>(floats);
  for (size_t index = 0; index < count; ++index) to[index].value = Element::store(from[index].value);
}

void widen(Dtype dtype, void* out, const void* elements, size_t count) {
  if (dtype == Dtype::kFloat16) return widen_as<Float16>(out, elements, count);
  widen_as<Bfloat16>(out, elements, count);
}

void narrow(Dtype dtype, void* out, const void* floats, size_t count) {
  if (dtype == Dtype::kFloat16) return narrow_as<Float16>(out, floats, count);
  narrow_as<Bfloat16>(out, floats, count);
}

template <class Float>
void divide_as(void* values, int divisor, size_t count) {
  auto* at = static_cast<Unaligned<Float>*>(values);
  for (size_t index = 0; index < count; ++index) at[index].value /= static_cast<Float>(divisor);
}

void divide(Dtype dtype, void* values, int divisor, size_t count) {
  if (dtype == Dtype::kFloat64) return divide_as<double>(values, divisor, count);
  divide_as<float>(values, divisor, count);
}

void combine(Dtype dtype, ReduceOp op, void* partial, const void* elements, size_t count) {
  const void* sources[] = {partial, elements};
  reduce(dtype, partial_op(op), partial, sources, 2, count);
}

}  // namespace

Dtype partial_dtype(Dtype dtype, ReduceOp op) { return travels_wide(dtype, op) ? Dtype::kFloat32 : dtype; }

void begin_partial(Dtype dtype, ReduceOp op, void* partial, const void* elements, size_t count) {
  if (travels_wide(dtype, op)) return widen(dtype, partial, elements, count);
  if (count > 0) std::memcpy(partial, elements, count * dtype_size(dtype));
}

void add_to_partial(Dtype dtype, ReduceOp op, void* partial, const void* elements, size_t count) {
  if (!travels_wide(dtype, op)) return combine(dtype, op, partial, elements, count);
  float wide[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = std::min(kBlock, count - begin);
    widen(dtype, wide, static_cast<const std::byte*>(elements) + begin * dtype_size(dtype), block);
    combine(Dtype::kFloat32, op, static_cast<std::byte*>(partial) + begin * sizeof(float), wide, block);
  }
}

void finish_partial(Dtype dtype, ReduceOp op, void* out, void* partial, int source_count, size_t count) {
  if (op == ReduceOp::kAvg) divide(partial_dtype(dtype, op), partial, source_count, count);
  if (travels_wide(dtype, op)) return narrow(dtype, out, partial, count);
  if (count > 0) std::memcpy(out, partial, count * dtype_size(dtype));
}

}  // namespace procgroup
