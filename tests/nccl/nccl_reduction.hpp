// Stand-in for NCCL's arithmetic: the data types, and how the ranks' contributions become one.
//
// Contributions are combined in rank order, float16 and bfloat16 in float, so that every rank gets the same bits.
// Both float8 types are moved, not reduced.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace stand_in::nccl {

using Bytes = std::vector<std::byte>;

// ncclDataType_t, as a number: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8.
constexpr int kReducedTypes = 10;
constexpr int kTypes = 12;
using ReducedTypes = std::make_index_sequence<kReducedTypes>;

enum Reduction : int { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

inline size_t size_of(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

inline const char* name_of_type(int type) {
  constexpr const char* kNames[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                    "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
  return kNames[type];
}

inline const char* name_of_reduction(int reduction) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  return kNames[reduction < kPreMulSum ? reduction : kPreMulSum];
}

struct Float16 {
  uint16_t bits;

  Float16(float value) {  // NOLINT: converts as the built-in types do
    const float size = std::fabs(value);
    const int exponent = std::max(std::ilogb(size), -14);
    if (std::isnan(value)) {
      bits = 0x7e00;
    } else if (size >= 65520) {
      bits = 0x7c00;
    } else if (size == 0) {
      bits = 0;
    } else {  // a carry out of the mantissa goes where it belongs, into the exponent
      bits = static_cast<uint16_t>(((exponent + 14) << 10) + std::lrint(std::ldexp(size, 10 - exponent)));
    }
    bits |= std::signbit(value) ? 0x8000 : 0;
  }

  operator float() const {  // NOLINT
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(mantissa, -24)
                                       : std::ldexp(1024 + mantissa, exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
  }
};

struct Bfloat16 {
  uint16_t bits;

  Bfloat16(float value) {  // NOLINT
    const auto wide = std::bit_cast<uint32_t>(value);
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }  // NOLINT
};

template <class T>
using Accumulator = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T>
T element(const Bytes& bytes, size_t index) {
  std::array<std::byte, sizeof(T)> raw;
  std::memcpy(raw.data(), bytes.data() + index * sizeof(T), sizeof(T));
  return std::bit_cast<T>(raw);
}

template <class Wide>
Wide combine(int reduction, Wide left, Wide right) {
  if (reduction == kProd) return static_cast<Wide>(left * right);
  if (reduction == kMax) return left < right ? right : left;
  if (reduction == kMin) return right < left ? right : left;
  return static_cast<Wide>(left + right);
}

template <class T>
void reduce_as(int reduction, const std::vector<Bytes>& contributions, std::byte* result) {
  using Wide = Accumulator<T>;
  for (size_t i = 0; i < contributions[0].size() / sizeof(T); ++i) {
    Wide total = element<T>(contributions[0], i);
    for (size_t rank = 1; rank < contributions.size(); ++rank) {
      total = combine<Wide>(reduction, total, element<T>(contributions[rank], i));
    }
    if (reduction == kAvg) total = static_cast<Wide>(total / static_cast<Wide>(contributions.size()));
    const T rounded(total);
    std::memcpy(result + i * sizeof(T), &rounded, sizeof(T));
  }
}

template <class T>
void scale_as(const Bytes& factor, Bytes& values) {
  using Wide = Accumulator<T>;
  for (size_t i = 0; i < values.size() / sizeof(T); ++i) {
    const T scaled(static_cast<Wide>(static_cast<Wide>(element<T>(factor, 0)) * element<T>(values, i)));
    std::memcpy(values.data() + i * sizeof(T), &scaled, sizeof(T));
  }
}

// Call `action.operator()<T>()` with the C++ type of a data type; float8 has none.
template <class Action, size_t... kIndex>
void with_type(int type, Action action, std::index_sequence<kIndex...>) {
  using Types = std::tuple<int8_t, uint8_t, int32_t, uint32_t, int64_t, uint64_t, Float16, float, double, Bfloat16>;
  ((type == kIndex ? action.template operator()<std::tuple_element_t<kIndex, Types>>() : void()), ...);
}

inline void reduce(int type, int reduction, const std::vector<Bytes>& contributions, std::byte* result) {
  with_type(type, [&]<class T>() { reduce_as<T>(reduction, contributions, result); }, ReducedTypes{});
}

// Multiply each value by the one factor, as PreMulSum does before it adds.
inline void scale(int type, const Bytes& factor, Bytes& values) {
  with_type(type, [&]<class T>() { scale_as<T>(factor, values); }, ReducedTypes{});
}

}  // namespace stand_in::nccl
