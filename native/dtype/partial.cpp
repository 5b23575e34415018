#include "dtype/partial.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dtype/kernels.hpp"

namespace procgroup {
namespace {

// Elements that stay in the first-level cache between two passes.
constexpr size_t kBlock = 2048;

bool is_half(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16; }

bool is_widened(Dtype dtype, ReduceOp op) { return is_half(dtype) && op != ReduceOp::kMin && op != ReduceOp::kMax; }

ReduceOp without_division(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

const void* moved(const void* address, size_t bytes) { return static_cast<const std::byte*>(address) + bytes; }
void* moved(void* address, size_t bytes) { return static_cast<std::byte*>(address) + bytes; }

template <class T>
void divide_as(void* elements, size_t count, int divisor) {
  auto* bytes = static_cast<std::byte*>(elements);
  for (size_t index = 0; index < count; ++index) {  // at any address
    T element;
    std::memcpy(&element, bytes + index * sizeof element, sizeof element);
    element /= static_cast<float>(divisor);
    std::memcpy(bytes + index * sizeof element, &element, sizeof element);
  }
}

void divide(Dtype dtype, void* elements, size_t count, int divisor) {
  switch (dtype) {
    case Dtype::kFloat32:
      return divide_as<float>(elements, count, divisor);
    case Dtype::kComplex64:
      return divide_as<float>(elements, 2 * count, divisor);
    case Dtype::kFloat64:
      return divide_as<double>(elements, count, divisor);
    default:
      return divide_as<double>(elements, 2 * count, divisor);
  }
}

}  // namespace

bool has_partial_results(Dtype dtype, ReduceOp op) { return op != ReduceOp::kAvg || is_inexact(dtype); }

size_t partial_size(Dtype dtype, ReduceOp op) { return is_widened(dtype, op) ? sizeof(float) : dtype_size(dtype); }

void reduce_to_partial(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count,
                       size_t count) {
  const ReduceOp combining = without_division(op);
  if (!is_widened(dtype, op)) return reduce(dtype, combining, out, sources, source_count, count);
  float widened[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = std::min(kBlock, count - begin);
    void* partial = moved(out, begin * sizeof(float));
    widen_halves(dtype, partial, moved(sources[0], begin * dtype_size(dtype)), block);
    for (int source = 1; source < source_count; ++source) {
      widen_halves(dtype, widened, moved(sources[source], begin * dtype_size(dtype)), block);
      const void* const pair[] = {partial, widened};
      reduce(Dtype::kFloat32, combining, partial, pair, 2, block);
    }
  }
}

void reduce_partials(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count, size_t count,
                     int divisor) {
  const bool narrows = is_widened(dtype, op);
  const Dtype partial = narrows ? Dtype::kFloat32 : dtype;
  const ReduceOp combining = without_division(op);
  float sums[kBlock];
  std::vector<const void*> parts(static_cast<size_t>(source_count));
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = std::min(kBlock, count - begin);
    for (size_t source = 0; source < parts.size(); ++source)
      parts[source] = moved(sources[source], begin * dtype_size(partial));
    void* elements = moved(out, begin * dtype_size(dtype));
    void* sum = narrows ? sums : elements;
    reduce(partial, combining, sum, parts.data(), source_count, block);
    if (op == ReduceOp::kAvg) divide(partial, sum, block, divisor);
    if (narrows) narrow_halves(dtype, elements, sums, block);
  }
}

}  // namespace procgroup
