// The element kernels at awkward addresses, for the sanitizers, and their speed. What they compute is
// compared with NumPy by the Python tests.
#include "dtype/kernels.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "base/clock.hpp"
#include "dtype/dtype.hpp"
#include "dtype/partial.hpp"
#include "tests/check.hpp"

namespace procgroup {
namespace {

constexpr size_t kCounts[] = {0, 1, 7, 8, 65, 1000, 2049, 4097};

// Of float16 without NaNs: which of two is kept depends on the instructions.
std::vector<uint8_t> some_bytes(size_t bytes, uint32_t seed, Dtype dtype) {
  const int mask = dtype == Dtype::kBool ? 1 : dtype == Dtype::kFloat16 ? 0xbf : 0xff;
  std::vector<uint8_t> result(bytes);
  uint32_t state = seed;
  for (uint8_t& byte : result) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24) & mask;
  }
  return result;
}

// Each source begins at an odd offset of a vector that ends with its last byte: reading beyond is seen.
std::vector<uint8_t> reduced(Dtype dtype, ReduceOp op, int source_count, size_t count) {
  const size_t bytes = count * dtype_size(dtype);
  std::vector<std::vector<uint8_t>> memory;
  std::vector<const void*> sources;
  for (int index = 0; index < source_count; ++index) {
    const size_t offset = static_cast<size_t>(index) % 3 + 1;
    memory.push_back(some_bytes(bytes + offset, static_cast<uint32_t>(index), dtype));
    sources.push_back(memory.back().data() + offset);
  }
  std::vector<uint8_t> out(bytes + 1);
  reduce(dtype, op, out.data() + 1, sources.data(), source_count, count);
  return out;
}

void every_kernel_stays_within_its_arrays() {
  for (const std::string& name : instruction_sets()) {
    set_instruction_set(name);
    for (int dtype = 0; dtype < kDtypes; ++dtype)
      for (int op = 0; op < kReduceOps; ++op)
        for (const int source_count : {1, 2, 3, 4, 7})
          for (const size_t count : kCounts) {
            if (!supports(static_cast<ReduceOp>(op), static_cast<Dtype>(dtype))) continue;
            CASE("%s, %s, %s, %d sources of %zu elements", name.c_str(), dtype_name(static_cast<Dtype>(dtype)),
                 reduce_op_name(static_cast<ReduceOp>(op)), source_count, count);
            reduced(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), source_count, count);
          }
  }
}

// The first two sources are one host's, the third is another's: combined in the order of reduce().
std::vector<uint8_t> reduced_in_two_steps(Dtype dtype, ReduceOp op, size_t count) {
  const size_t bytes = count * dtype_size(dtype);
  std::vector<std::vector<uint8_t>> memory;
  for (uint32_t index = 0; index < 3; ++index) memory.push_back(some_bytes(bytes + index + 1, index, dtype));
  const void* const first[] = {memory[0].data() + 1, memory[1].data() + 2};
  const void* const second[] = {memory[2].data() + 3};
  std::vector<uint8_t> partials[2];
  for (std::vector<uint8_t>& partial : partials) partial.resize(count * partial_size(dtype, op) + 1);
  reduce_to_partial(dtype, op, partials[0].data() + 1, first, 2, count);
  reduce_to_partial(dtype, op, partials[1].data() + 1, second, 1, count);
  const void* const sources[] = {partials[0].data() + 1, partials[1].data() + 1};
  std::vector<uint8_t> out(bytes + 1);
  reduce_partials(dtype, op, out.data() + 1, sources, 2, count, 3);
  return out;
}

void two_steps_give_the_bits_of_one() {
  for (const std::string& name : instruction_sets()) {
    set_instruction_set(name);
    for (int index = 0; index < kDtypes * kReduceOps; ++index) {
      const auto dtype = static_cast<Dtype>(index / kReduceOps);
      const auto op = static_cast<ReduceOp>(index % kReduceOps);
      if (!supports(op, dtype) || !has_partial_results(dtype, op)) continue;
      for (const size_t count : kCounts) {
        CASE("%s, %s, %s, %zu elements", name.c_str(), dtype_name(dtype), reduce_op_name(op), count);
        CHECK_EQUAL(reduced_in_two_steps(dtype, op, count), reduced(dtype, op, 3, count));
      }
    }
  }
}

void a_pair_without_meaning_is_refused() {
  for (int dtype = 0; dtype < kDtypes; ++dtype)
    for (int op = 0; op < kReduceOps; ++op) {
      if (supports(static_cast<ReduceOp>(op), static_cast<Dtype>(dtype))) continue;
      CASE("%s, %s", dtype_name(static_cast<Dtype>(dtype)), reduce_op_name(static_cast<ReduceOp>(op)));
      bool refused = false;
      try {
        reduced(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), 2, 3);
      } catch (const std::invalid_argument&) {
        refused = true;
      }
      CHECK(refused);
    }
}

void report_the_speed() {
  constexpr size_t kBytes = 512 * 1024;
  const struct {
    Dtype dtype;
    ReduceOp op;
  } cases[] = {{Dtype::kFloat32, ReduceOp::kSum},
               {Dtype::kFloat32, ReduceOp::kMin},
               {Dtype::kFloat16, ReduceOp::kSum},
               {Dtype::kBfloat16, ReduceOp::kSum},
               {Dtype::kFloat64, ReduceOp::kMax}};
  const std::vector<uint8_t> zeros(kBytes);
  std::vector<uint8_t> out(kBytes);
  for (const std::string& name : instruction_sets()) {
    set_instruction_set(name);
    for (const auto& [dtype, op] : cases) {
      const void* sources[] = {out.data(), zeros.data()};
      int64_t best = INT64_MAX;
      for (int round = 0; round < 20; ++round) {
        const int64_t begin = now_ns();
        reduce(dtype, op, out.data(), sources, 2, kBytes / dtype_size(dtype));
        best = std::min(best, now_ns() - begin);
      }
      std::fprintf(stderr, "\n  %-8s %s %s, 2 sources of 512 KiB: %.1f us, %.1f GB/s of each", name.c_str(),
                   dtype_name(dtype), reduce_op_name(op), static_cast<double>(best) / 1e3,
                   static_cast<double>(kBytes) / static_cast<double>(best));
    }
  }
  std::fprintf(stderr, "\n ");
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(100);
  RUN_TEST(every_kernel_stays_within_its_arrays);
  RUN_TEST(two_steps_give_the_bits_of_one);
  RUN_TEST(a_pair_without_meaning_is_refused);
  RUN_TEST(report_the_speed);
  return 0;
}
