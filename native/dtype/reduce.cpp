// reduce(): chooses the instruction set once, then looks the kernel up.
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "dtype/dtype.hpp"
#include "dtype/kernels.hpp"

namespace procgroup {

namespace {

struct InstructionSet {
  const char* name;
  const KernelTable* table;
};

std::vector<InstructionSet> available() {
  std::vector<InstructionSet> found{{"baseline", &baseline::kernel_table()}};
#ifdef PROCGROUP_X86_KERNELS
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return found;
  found.push_back({"avx2", &avx2::kernel_table()});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back({"avx512", &avx512::kernel_table()});
  }
#endif
  return found;
}

struct Dispatch {
  const std::vector<InstructionSet> sets = available();
  // Relaxed: the entries never change once they are built, and any of them gives the same bits.
  std::atomic<const InstructionSet*> chosen{&sets.back()};
};

Dispatch& dispatch() {
  static Dispatch instance;
  return instance;
}

const KernelTable& chosen_table() { return *dispatch().chosen.load(std::memory_order_relaxed)->table; }

}  // namespace

const char* instruction_set() { return dispatch().chosen.load(std::memory_order_relaxed)->name; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : dispatch().sets) names.emplace_back(set.name);
  return names;
}

void set_instruction_set(const std::string& name) {
  for (const InstructionSet& set : dispatch().sets) {
    if (name == set.name) return dispatch().chosen.store(&set, std::memory_order_relaxed);
  }
  std::string known;
  for (const std::string& set : instruction_sets()) known += (known.empty() ? "" : ", ") + set;
  throw std::invalid_argument("expected an instruction set of this processor (" + known + "), got " + name);
}

void widen_halves(Dtype dtype, void* out, const void* in, size_t count) {
  (dtype == Dtype::kFloat16 ? chosen_table().widen_float16 : chosen_table().widen_bfloat16)(out, in, count);
}

void narrow_halves(Dtype dtype, void* out, const void* in, size_t count) {
  (dtype == Dtype::kFloat16 ? chosen_table().narrow_float16 : chosen_table().narrow_bfloat16)(out, in, count);
}

Kernel reduction_kernel(Dtype dtype, ReduceOp op) {
  if (!supports(op, dtype))
    throw std::invalid_argument(std::string(reduce_op_name(op)) + " is not defined for " + dtype_name(dtype));
  return chosen_table().kernels[static_cast<int>(dtype)][static_cast<int>(combining(op, dtype))];
}

void reduce(Dtype dtype, ReduceOp op, void* out, const void* const* sources, int source_count, size_t count) {
  const Kernel kernel = reduction_kernel(dtype, op);
  if (source_count < 1) {
    throw std::invalid_argument("expected at least 1 source, got " + std::to_string(source_count));
  }
  if (count == 0) return;
  if (source_count > 1) {
    kernel(out, sources, source_count, count);
  } else if (out != sources[0]) {  // the law of one source: see dtype/reduce_ops.hpp
    std::memcpy(out, sources[0], count * dtype_size(dtype));
  }
}

}  // namespace procgroup
