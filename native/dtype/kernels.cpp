// The element kernels, compiled once per instruction set into the namespace PROCGROUP_KERNELS.
//
// Every kernel is a plain loop that the compiler vectorises; only float16 with F16C is written with
// intrinsics, because compilers do not vectorise that conversion. Two, three and four sources are
// combined in registers. More go through an accumulator that stays in the first-level cache:
//
//     sources  0 1 | 2 | 3 | ... | n-1
//               \|   |   |         |
//     block     [accumulator]  ->  out        and then the next block
#include "dtype/kernels.hpp"

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "dtype/combine.hpp"
#include "dtype/elements.hpp"

// `out` may be one of the sources, at the same address: iterations are independent although the
// compiler cannot know it.
#ifdef __clang__
#define PROCGROUP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PROCGROUP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace procgroup::PROCGROUP_KERNELS {
namespace {

constexpr size_t kBlockBytes = 8192;

template <class Element>
using Source = const Unaligned<typename Element::Storage>*;

template <class Element>
Source<Element> source_at(const void* const* sources, int index, size_t begin) {
  return static_cast<Source<Element>>(sources[index]) + begin;
}

template <class Element>
typename Element::Accumulator load(Source<Element> source, size_t index) {
  return Element::load(source[index].value);
}

template <class Element, class Op, int kSources>
void combine_in_registers(void* out, const void* const* sources, size_t count) {
  const auto first = source_at<Element>(sources, 0, 0);
  const auto second = source_at<Element>(sources, 1, 0);
  const auto third = kSources > 2 ? source_at<Element>(sources, 2, 0) : nullptr;
  const auto fourth = kSources > 3 ? source_at<Element>(sources, 3, 0) : nullptr;
  const auto target = static_cast<Unaligned<typename Element::Storage>*>(out);
  PROCGROUP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    auto value = Op::combine(load<Element>(first, i), load<Element>(second, i));
    if constexpr (kSources > 2) value = Op::combine(value, load<Element>(third, i));
    if constexpr (kSources > 3) value = Op::combine(value, load<Element>(fourth, i));
    target[i].value = Element::store(Op::finish(value, kSources));
  }
}

template <class Element, class Op>
void combine_block(void* out, const void* const* sources, int source_count, size_t begin, size_t count) {
  using Accumulator = typename Element::Accumulator;
  alignas(64) Accumulator accumulator[kBlockBytes / sizeof(Accumulator)];
  const auto first = source_at<Element>(sources, 0, begin);
  const auto second = source_at<Element>(sources, 1, begin);
  for (size_t i = 0; i < count; ++i) accumulator[i] = Op::combine(load<Element>(first, i), load<Element>(second, i));
  for (int next = 2; next < source_count - 1; ++next) {
    const auto source = source_at<Element>(sources, next, begin);
    for (size_t i = 0; i < count; ++i) accumulator[i] = Op::combine(accumulator[i], load<Element>(source, i));
  }
  const auto last = source_at<Element>(sources, source_count - 1, begin);
  const auto target = static_cast<Unaligned<typename Element::Storage>*>(out) + begin;
  PROCGROUP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const Accumulator value = Op::combine(accumulator[i], load<Element>(last, i));
    target[i].value = Element::store(Op::finish(value, source_count));
  }
}

template <class Element, class Op>
void kernel(void* out, const void* const* sources, int source_count, size_t count) {
  if (source_count == 2) return combine_in_registers<Element, Op, 2>(out, sources, count);
  if (source_count == 3) return combine_in_registers<Element, Op, 3>(out, sources, count);
  if (source_count == 4) return combine_in_registers<Element, Op, 4>(out, sources, count);
  constexpr size_t kBlock = kBlockBytes / sizeof(typename Element::Accumulator);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    combine_block<Element, Op>(out, sources, source_count, begin, count - begin < kBlock ? count - begin : kBlock);
  }
}

// Bitwise ops see bytes, whatever the width of the elements.
template <class Op, size_t kSize>
void bitwise_kernel(void* out, const void* const* sources, int source_count, size_t count) {
  kernel<Plain<uint8_t>, Op>(out, sources, source_count, count * kSize);
}

// Sums of complex numbers are sums of their parts.
template <class T, class Op>
void by_iovecs(void* out, const void* const* sources, int source_count, size_t count) {
  kernel<Plain<T>, Op>(out, sources, source_count, 2 * count);
}

// Products of complex numbers, as in the textbook. The accumulator keeps real and imaginary parts apart: side by side,
// GCC would combine them with fused multiply-adds, which round otherwise, whatever -ffp-contract says.
template <class T>
void complex_product(void* out, const void* const* sources, int source_count, size_t count) {
  constexpr size_t kBlock = kBlockBytes / sizeof(T) / 2;
  alignas(64) T real[kBlock];
  alignas(64) T imaginary[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = count - begin < kBlock ? count - begin : kBlock;
    const auto first = source_at<Plain<T>>(sources, 0, 2 * begin);
    for (size_t i = 0; i < block; ++i) real[i] = first[2 * i].value;
    for (size_t i = 0; i < block; ++i) imaginary[i] = first[2 * i + 1].value;
    for (int next = 1; next < source_count; ++next) {
      const auto source = source_at<Plain<T>>(sources, next, 2 * begin);
      for (size_t i = 0; i < block; ++i) {
        const T left = real[i];
        const T right = source[2 * i].value;
        real[i] = left * right - imaginary[i] * source[2 * i + 1].value;
        imaginary[i] = left * source[2 * i + 1].value + imaginary[i] * right;
      }
    }
    const auto target = static_cast<Unaligned<T>*>(out) + 2 * begin;
    for (size_t i = 0; i < block; ++i) target[2 * i].value = real[i];
    for (size_t i = 0; i < block; ++i) target[2 * i + 1].value = imaginary[i];
  }
}

// The element that is left when the others were combined several at a time.
template <class Element, class Op>
void combine_one(void* out, const void* const* sources, int source_count, size_t index) {
  auto value = load<Element>(source_at<Element>(sources, 0, index), 0);
  for (int next = 1; next < source_count; ++next)
    value = Op::combine(value, load<Element>(source_at<Element>(sources, next, index), 0));
  const auto target = static_cast<Unaligned<typename Element::Storage>*>(out) + index;
  target->value = Element::store(Op::finish(value, source_count));
}

template <class Element>
void widen_elements(void* out, const void* in, size_t count) {
  const auto source = static_cast<Source<Element>>(in);
  const auto target = static_cast<Unaligned<float>*>(out);
  PROCGROUP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) target[i].value = load<Element>(source, i);
}

template <class Element>
void narrow_elements(void* out, const void* in, size_t count) {
  const auto source = static_cast<Source<Plain<float>>>(in);
  const auto target = static_cast<Unaligned<uint16_t>*>(out);
  PROCGROUP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) target[i].value = Element::store(source[i].value);
}

template <class Op>
void bfloat16_kernel(void* out, const void* const* sources, int source_count, size_t count) {
  kernel<Bfloat16Pair, Op>(out, sources, source_count, count / 2);
  if (count % 2 != 0) combine_one<Bfloat16, Op>(out, sources, source_count, count - 1);
}

#ifdef __F16C__

// Eight at a time.
constexpr size_t kLanes = 8;

inline __m256 widen(const void* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(source)));
}

inline void narrow(void* out, __m256 value) {
  _mm_storeu_si128(static_cast<__m128i*>(out), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

inline const char* bytes_at(const void* address, size_t index) {
  return static_cast<const char*>(address) + index * sizeof(uint16_t);
}

template <class Op>
void combine_lanes(void* out, const void* const* sources, int source_count, size_t count) {
  for (size_t i = 0; i < count; i += kLanes) {
    auto value = Op::combine(widen(bytes_at(sources[0], i)), widen(bytes_at(sources[1], i)));
    for (int next = 2; next < source_count; ++next) value = Op::combine(value, widen(bytes_at(sources[next], i)));
    narrow(static_cast<char*>(out) + i * sizeof(uint16_t), Op::finish(value, source_count));
  }
}

template <class Op>
void float16_kernel(void* out, const void* const* sources, int source_count, size_t count) {
  const size_t whole = count - count % kLanes;
  if (source_count == 2) {
    combine_lanes<Op>(out, sources, 2, whole);
  } else {
    combine_lanes<Op>(out, sources, source_count, whole);
  }
  for (size_t i = whole; i < count; ++i) combine_one<Float16, Op>(out, sources, source_count, i);
}

void widen_float16(void* out, const void* in, size_t count) {
  const size_t whole = count - count % kLanes;
  float* target = static_cast<float*>(out);
  for (size_t i = 0; i < whole; i += kLanes) _mm256_storeu_ps(target + i, widen(bytes_at(in, i)));
  widen_elements<Float16>(target + whole, bytes_at(in, whole), count - whole);
}

void narrow_float16(void* out, const void* in, size_t count) {
  const size_t whole = count - count % kLanes;
  const float* source = static_cast<const float*>(in);
  char* target = static_cast<char*>(out);
  for (size_t i = 0; i < whole; i += kLanes) narrow(target + i * sizeof(uint16_t), _mm256_loadu_ps(source + i));
  narrow_elements<Float16>(target + whole * sizeof(uint16_t), source + whole, count - whole);
}

#else

constexpr Conversion widen_float16 = widen_elements<Float16>;
constexpr Conversion narrow_float16 = narrow_elements<Float16>;

template <class Op>
void float16_kernel(void* out, const void* const* sources, int source_count, size_t count) {
  kernel<Float16, Op>(out, sources, source_count, count);
}

#endif

constexpr uint16_t kFloat16Infinity = 0x7c00;
constexpr uint16_t kBfloat16Infinity = 0x7f80;

using KernelRow = Kernel[kReduceOps];

constexpr Kernel& of(KernelRow& row, ReduceOp op) { return row[static_cast<int>(op)]; }

template <size_t kSize>
constexpr void set_bitwise(KernelRow& row) {
  of(row, ReduceOp::kBand) = bitwise_kernel<And, kSize>;
  of(row, ReduceOp::kBor) = bitwise_kernel<Or, kSize>;
  of(row, ReduceOp::kBxor) = bitwise_kernel<Xor, kSize>;
}

// Sums and products of signed integers wrap, so they are those of the unsigned ones.
template <class SignedOrNot, class Unsigned, template <class> class Wide>
constexpr void set_integer(KernelRow& row) {
  of(row, ReduceOp::kSum) = kernel<Plain<Unsigned>, Sum>;
  of(row, ReduceOp::kAvg) = kernel<Wide<SignedOrNot>, Average>;
  of(row, ReduceOp::kProduct) = kernel<Plain<Unsigned>, Product>;
  of(row, ReduceOp::kMin) = kernel<Plain<SignedOrNot>, Min>;
  of(row, ReduceOp::kMax) = kernel<Plain<SignedOrNot>, Max>;
  set_bitwise<sizeof(Unsigned)>(row);
}

template <uint16_t kInfinity>
constexpr void set_half_order(KernelRow& row) {
  of(row, ReduceOp::kMin) = kernel<Ordered16<kInfinity, INT16_MIN>, Min>;
  of(row, ReduceOp::kMax) = kernel<Ordered16<kInfinity, INT16_MAX>, Max>;
}

template <class T>
constexpr void set_floating(KernelRow& row) {
  of(row, ReduceOp::kSum) = kernel<Plain<T>, Sum>;
  of(row, ReduceOp::kAvg) = kernel<Plain<T>, Average>;
  of(row, ReduceOp::kProduct) = kernel<Plain<T>, Product>;
  of(row, ReduceOp::kMin) = kernel<Plain<T>, Min>;
  of(row, ReduceOp::kMax) = kernel<Plain<T>, Max>;
}

template <class T>
constexpr void set_complex(KernelRow& row) {
  of(row, ReduceOp::kSum) = by_iovecs<T, Sum>;
  of(row, ReduceOp::kAvg) = by_iovecs<T, Average>;
  of(row, ReduceOp::kProduct) = complex_product<T>;
}

constexpr KernelTable make_table() {
  KernelTable table{};
  const auto row = [&table](Dtype dtype) -> KernelRow& { return table.kernels[static_cast<int>(dtype)]; };
  set_bitwise<1>(row(Dtype::kBool));
  set_integer<int8_t, uint8_t, AsDouble>(row(Dtype::kInt8));
  set_integer<uint8_t, uint8_t, AsDouble>(row(Dtype::kUint8));
  set_integer<int16_t, uint16_t, AsDouble>(row(Dtype::kInt16));
  set_integer<uint16_t, uint16_t, AsDouble>(row(Dtype::kUint16));
  set_integer<int32_t, uint32_t, AsDouble>(row(Dtype::kInt32));
  set_integer<uint32_t, uint32_t, AsDouble>(row(Dtype::kUint32));
  set_integer<int64_t, uint64_t, AsInt128>(row(Dtype::kInt64));
  set_integer<uint64_t, uint64_t, AsInt128>(row(Dtype::kUint64));
  KernelRow& float16 = row(Dtype::kFloat16);
  of(float16, ReduceOp::kSum) = float16_kernel<Sum>;
  of(float16, ReduceOp::kAvg) = float16_kernel<Average>;
  of(float16, ReduceOp::kProduct) = float16_kernel<Product>;
  set_half_order<kFloat16Infinity>(float16);
  KernelRow& bfloat16 = row(Dtype::kBfloat16);
  of(bfloat16, ReduceOp::kSum) = bfloat16_kernel<Sum>;
  of(bfloat16, ReduceOp::kAvg) = bfloat16_kernel<Average>;
  of(bfloat16, ReduceOp::kProduct) = bfloat16_kernel<Product>;
  set_half_order<kBfloat16Infinity>(bfloat16);
  set_floating<float>(row(Dtype::kFloat32));
  set_floating<double>(row(Dtype::kFloat64));
  set_complex<float>(row(Dtype::kComplex64));
  set_complex<double>(row(Dtype::kComplex128));
  table.widen_float16 = widen_float16;
  table.narrow_float16 = narrow_float16;
  table.widen_bfloat16 = widen_elements<Bfloat16>;
  table.narrow_bfloat16 = narrow_elements<Bfloat16>;
  return table;
}

constexpr KernelTable kTable = make_table();

}  // namespace

const KernelTable& kernel_table() { return kTable; }

}  // namespace procgroup::PROCGROUP_KERNELS
