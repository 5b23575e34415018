// How two accumulators become one, for each reduce op. Included by kernels.cpp only, as elements.hpp.
#pragma once

#include <cstdint>

#include "dtype/elements.hpp"

namespace procgroup::PROCGROUP_KERNELS {
namespace {

struct Sum {
  template <class T>
  static T combine(T left, T right) {
    return static_cast<T>(left + right);
  }
  template <class T>
  static T finish(T sum, int) {
    return sum;
  }
};

// Integers have their accumulator's quotient truncated toward zero: a double by its conversion back to an integer.
struct Average : Sum {
  template <class T>
  static T finish(T sum, int source_count) {
    return sum / static_cast<float>(source_count);
  }
  static Int128 finish(Int128 sum, int source_count) { return sum / source_count; }
};

struct Product : Sum {
  template <class T>
  static T combine(T left, T right) {
    return left * right;
  }
  // As unsigned int: uint16 would be promoted to int, which may not overflow.
  static uint16_t combine(uint16_t left, uint16_t right) { return static_cast<uint16_t>(1u * left * right); }
  static uint8_t combine(uint8_t left, uint8_t right) { return static_cast<uint8_t>(1u * left * right); }
};

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline uint64_t bits_of(double value) { return __builtin_bit_cast(uint64_t, value); }

// The comparisons stand apart from the selections so that the loops have no branches. Equal values
// differ in bits only as -0.0 and +0.0: "or" keeps the sign, "and" drops it. A NaN on the left is
// neither less nor equal; one on the right is what the first selection already gives.
template <class T, class Bits = decltype(bits_of(T{}))>
T select_floating(bool take_left, bool left_is_nan, bool equal, T left, T right, Bits zeros) {
  const Bits ordered = take_left ? bits_of(left) : bits_of(right);
  const Bits chosen = equal ? zeros : ordered;
  return __builtin_bit_cast(T, left_is_nan ? bits_of(left) : chosen);
}

struct Min : Sum {
  template <class T>
  static T combine(T left, T right) {
    return left < right ? left : right;
  }
  static float combine(float left, float right) { return floating(left, right); }
  static double combine(double left, double right) { return floating(left, right); }
  template <class T>
  static T floating(T left, T right) {
    return select_floating(left < right, left != left, left == right, left, right, bits_of(left) | bits_of(right));
  }
};

struct Max : Sum {
  template <class T>
  static T combine(T left, T right) {
    return left > right ? left : right;
  }
  static float combine(float left, float right) { return floating(left, right); }
  static double combine(double left, double right) { return floating(left, right); }
  template <class T>
  static T floating(T left, T right) {
    return select_floating(left > right, left != left, left == right, left, right, bits_of(left) & bits_of(right));
  }
};

struct And : Sum {
  static uint8_t combine(uint8_t left, uint8_t right) { return left & right; }
};

struct Or : Sum {
  static uint8_t combine(uint8_t left, uint8_t right) { return left | right; }
};

struct Xor : Sum {
  static uint8_t combine(uint8_t left, uint8_t right) { return left ^ right; }
};

}  // namespace
}  // namespace procgroup::PROCGROUP_KERNELS
