// How each dtype is loaded from memory, and stored again after its elements were combined.
//
// An *element* type names its Storage (the type in memory) and its Accumulator (the type that is combined).
// kernels.cpp includes this file, once per instruction set, and preparation.cpp: everything is in that set's own
// namespace, so that the linker cannot replace code for one processor by code for another.
#pragma once

#include <cstdint>

namespace procgroup::PROCGROUP_KERNELS {
namespace {

// An element at any address: arrays inside of messages and files need not be aligned.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

// A dtype whose elements are combined without a conversion.
template <class T>
struct Plain {
  using Storage = T;
  using Accumulator = T;
  static T load(T stored) { return stored; }
  static T store(T accumulated) { return accumulated; }
};

// 8- to 32-bit integers whose sum must not wrap, for AVG. Up to 2^21 ranks the sum is exact in a double, and the
// truncated quotient is right: a mean that is no integer is at least 2^-21 away from one, and rounded by at most 2^-22.
template <class T>
struct AsDouble {
  using Storage = T;
  using Accumulator = double;
  static double load(T stored) { return static_cast<double>(stored); }
  static T store(double mean) { return static_cast<T>(mean); }
};

__extension__ typedef __int128 Int128;

// The same for 64-bit integers.
template <class T>
struct AsInt128 {
  using Storage = T;
  using Accumulator = Int128;
  static Int128 load(T stored) { return stored; }
  static T store(Int128 mean) { return static_cast<T>(mean); }
};

inline float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of_float(float value) { return __builtin_bit_cast(uint32_t, value); }

// The float32 whose upper half is the nearest bfloat16, ties to even; the lower half is arbitrary. A NaN
// stays one: rounding it up could carry into infinity.
inline uint32_t rounded_to_upper_half(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return value != value ? bits | 0x400000 : rounded;
}

struct Bfloat16 {
  using Storage = uint16_t;
  using Accumulator = float;
  static float load(uint16_t stored) { return float_from_bits(uint32_t{stored} << 16); }
  static uint16_t store(float value) { return static_cast<uint16_t>(rounded_to_upper_half(value) >> 16); }
};

// Two neighbouring bfloat16 in one 32-bit word. Vectors of such words need no widening and narrowing,
// which would cost more than the sum itself.
struct FloatPair {
  float low;
  float high;
  FloatPair operator+(FloatPair other) const { return {low + other.low, high + other.high}; }
  FloatPair operator*(FloatPair other) const { return {low * other.low, high * other.high}; }
  FloatPair operator/(float divisor) const { return {low / divisor, high / divisor}; }
};

struct Bfloat16Pair {
  using Storage = uint32_t;
  using Accumulator = FloatPair;
  static FloatPair load(uint32_t stored) {
    return {float_from_bits(stored << 16), float_from_bits(stored & 0xffff0000u)};
  }
  static uint32_t store(FloatPair value) {
    return rounded_to_upper_half(value.low) >> 16 | (rounded_to_upper_half(value.high) & 0xffff0000u);
  }
};

#ifdef __aarch64__

struct Float16 {
  using Storage = uint16_t;
  using Accumulator = float;
  static float load(uint16_t stored) { return static_cast<float>(__builtin_bit_cast(__fp16, stored)); }
  static uint16_t store(float value) { return __builtin_bit_cast(uint16_t, static_cast<__fp16>(value)); }
};

#else

// Integer arithmetic that gives the bits of the F16C instructions, NaNs included, and that compilers
// vectorise: every case is computed and the right one selected.
struct Float16 {
  using Storage = uint16_t;
  using Accumulator = float;

  static float load(uint16_t stored) {
    const uint32_t magnitude = stored & 0x7fffu;
    const uint32_t shifted = magnitude << 13;
    const uint32_t normal = shifted + (112u << 23);  // from exponent bias 15 to 127
    const uint32_t subnormal = bits_of_float(float_from_bits(shifted + (113u << 23)) - float_from_bits(113u << 23));
    const uint32_t special = shifted | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
    const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
    return float_from_bits((magnitude >= 0x7c00u ? special : finite) | (stored & 0x8000u) << 16);
  }

  static uint16_t store(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // The last bit of 0.5f weighs as much as the smallest float16: the addition rounds to it.
    const uint32_t subnormal = bits_of_float(float_from_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    const uint32_t not_a_number = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t bounded = magnitude >= 0x477ff000u ? 0x7c00u : finite;
    return static_cast<uint16_t>((magnitude > 0x7f800000u ? not_a_number : bounded) | (bits >> 16 & 0x8000u));
  }
};

#endif

// The 16-bit floating-point dtypes as integers in the order of their values, -0.0 before +0.0, for MIN
// and MAX. NaNs become kNan, the integer that wins.
template <uint16_t kInfinity, int16_t kNan>
struct Ordered16 {
  using Storage = uint16_t;
  using Accumulator = int16_t;

  static int16_t flip(int16_t bits) { return static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff)); }
  static int16_t load(uint16_t stored) {
    const int16_t key = flip(static_cast<int16_t>(stored));
    return (stored & 0x7fff) > kInfinity ? kNan : key;
  }
  static uint16_t store(int16_t key) { return static_cast<uint16_t>(flip(key)); }
};

}  // namespace
}  // namespace procgroup::PROCGROUP_KERNELS
