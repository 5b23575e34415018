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

// One row of the table; the columns are those of ReduceOp. Sums and products of signed integers wrap,
// so they are those of the unsigned ones.
#define PROCGROUP_INTEGER_ROW(SIGNED_OR_NOT, UNSIGNED, WIDE)                                                          \
  {kernel<Plain<UNSIGNED>, Sum>,         kernel<WIDE<SIGNED_OR_NOT>, Average>, kernel<Plain<UNSIGNED>, Product>,      \
   kernel<Plain<SIGNED_OR_NOT>, Min>,    kernel<Plain<SIGNED_OR_NOT>, Max>,    bitwise_kernel<And, sizeof(UNSIGNED)>, \
   bitwise_kernel<Or, sizeof(UNSIGNED)>, bitwise_kernel<Xor, sizeof(UNSIGNED)>}

constexpr Kernel kAnd = bitwise_kernel<And, 1>;
constexpr Kernel kOr = bitwise_kernel<Or, 1>;
constexpr uint16_t kFloat16Infinity = 0x7c00;
constexpr uint16_t kBfloat16Infinity = 0x7f80;

constexpr KernelTable kTable = {
    {
        {kOr, nullptr, kAnd, kAnd, kOr, kAnd, kOr, bitwise_kernel<Xor, 1>},
        PROCGROUP_INTEGER_ROW(int8_t, uint8_t, AsDouble),
        PROCGROUP_INTEGER_ROW(uint8_t, uint8_t, AsDouble),
        PROCGROUP_INTEGER_ROW(int16_t, uint16_t, AsDouble),
        PROCGROUP_INTEGER_ROW(uint16_t, uint16_t, AsDouble),
        PROCGROUP_INTEGER_ROW(int32_t, uint32_t, AsDouble),
        PROCGROUP_INTEGER_ROW(uint32_t, uint32_t, AsDouble),
        PROCGROUP_INTEGER_ROW(int64_t, uint64_t, AsInt128),
        PROCGROUP_INTEGER_ROW(uint64_t, uint64_t, AsInt128),
        {float16_kernel<Sum>, float16_kernel<Average>, float16_kernel<Product>,
         kernel<Ordered16<kFloat16Infinity, INT16_MIN>, Min>, kernel<Ordered16<kFloat16Infinity, INT16_MAX>, Max>,
         nullptr, nullptr, nullptr},
        {bfloat16_kernel<Sum>, bfloat16_kernel<Average>, bfloat16_kernel<Product>,
         kernel<Ordered16<kBfloat16Infinity, INT16_MIN>, Min>, kernel<Ordered16<kBfloat16Infinity, INT16_MAX>, Max>,
         nullptr, nullptr, nullptr},
        {kernel<Plain<float>, Sum>, kernel<Plain<float>, Average>, kernel<Plain<float>, Product>,
         kernel<Plain<float>, Min>, kernel<Plain<float>, Max>, nullptr, nullptr, nullptr},
        {kernel<Plain<double>, Sum>, kernel<Plain<double>, Average>, kernel<Plain<double>, Product>,
         kernel<Plain<double>, Min>, kernel<Plain<double>, Max>, nullptr, nullptr, nullptr},
        {by_iovecs<float, Sum>, by_iovecs<float, Average>, complex_product<float>},
        {by_iovecs<double, Sum>, by_iovecs<double, Average>, complex_product<double>},
    },
    widen_float16,
    narrow_float16,
    widen_elements<Bfloat16>,
    narrow_elements<Bfloat16>,
};

}  // namespace

const KernelTable& kernel_table() { return kTable; }

}  // namespace procgroup::PROCGROUP_KERNELS
