// What the tests of collectives over messages share: groups, calls, inputs.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "collectives/network_call.hpp"
#include "dtype/dtype.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {

using Bytes = std::vector<std::byte>;

inline constexpr NetworkLimits kTiny{.small_bytes = 64,
                                     .segment_bytes = 256};  // so that few elements make many segments
inline constexpr uint64_t kGroup = 11;

inline GroupView everybody(int rank, int size) {
  GroupView group{kGroup, rank, {}};
  for (int member = 0; member < size; ++member) group.members.push_back(member);
  return group;
}

inline Descriptor call_of(OpKind op, Dtype dtype, ReduceOp reduce_op, size_t count, int root = -1,
                          uint64_t sequence = 1) {
  Descriptor call;
  call.group = kGroup;
  call.sequence = sequence;
  call.op = op;
  call.dtype = dtype;
  call.reduce_op = reduce_op;
  call.root = root;
  call.count = count;
  return call;
}

template <typename Element>
inline void fill_as(Bytes& array, int rank, unsigned seed) {
  for (size_t index = 0; index < array.size() / sizeof(Element); ++index) {
    const auto value = static_cast<Element>((index * 5 + static_cast<size_t>(rank) * 3 + seed) % 7 + 1);
    std::memcpy(array.data() + index * sizeof value, &value, sizeof value);
  }
}

// Sixteen-bit floats from 1 up, an ulp apart: their sums are exact as float32 and not as float16.
inline void fill_halves(Bytes& array, int rank, unsigned seed, uint16_t one) {
  for (size_t index = 0; index < array.size() / 2; ++index) {
    const auto value = static_cast<uint16_t>(one + (index * 5 + static_cast<size_t>(rank) * 3 + seed) % 61);
    std::memcpy(array.data() + index * 2, &value, 2);
  }
}

// What a rank contributes. Small numbers, so that every order of summation gives the same bits.
inline Bytes input_of(Dtype dtype, size_t count, int rank, unsigned seed = 0) {
  Bytes array(count * dtype_size(dtype));
  switch (dtype) {
    case Dtype::kFloat32:
      fill_as<float>(array, rank, seed);
      break;
    case Dtype::kFloat64:
      fill_as<double>(array, rank, seed);
      break;
    case Dtype::kInt64:
      fill_as<int64_t>(array, rank, seed);
      break;
    case Dtype::kFloat16:
      fill_halves(array, rank, seed, 0x3c00);
      break;
    case Dtype::kBfloat16:
      fill_halves(array, rank, seed, 0x3f80);
      break;
    default:
      fill_as<uint8_t>(array, rank, seed);
  }
  return array;
}

inline void finish(NetworkCall& operation, Messages& messages, Doorbell& doorbell) {
  pump_until(messages, doorbell, [&] {
    while (operation.advance() == Progress::kMoved) {
    }
    return operation.is_completed();
  });
}

// What one rank calls: a request and the arrays behind it. `array` is input and output; blocks have arrays of their
// own.
struct TestCall {
  TestCall() = default;
  TestCall(const TestCall&) = delete;
  TestCall& operator=(const TestCall&) = delete;

  static std::unique_ptr<TestCall> in_place(const Descriptor& descriptor, int rank) {
    auto call = std::make_unique<TestCall>();
    call->request.descriptor = descriptor;
    call->array = input_of(descriptor.dtype, descriptor.count, rank);
    call->request.input = call->request.output = call->array.data();
    return call;
  }

  Request request;
  Bytes array;
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
};

// World ranks 3, 0 and 2 are group ranks 0, 1 and 2.
inline GroupView shuffled_group(int world_rank) {
  GroupView group{kGroup, 0, {3, 0, 2}};
  group.rank = group.group_rank(world_rank);
  return group;
}

}  // namespace procgroup::testing
