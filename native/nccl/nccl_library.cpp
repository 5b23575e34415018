#include "nccl/nccl_library.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace procgroup {
namespace {

constexpr const char* kName = "libnccl.so.2";

void* open_library(const std::string& path) {
  if (dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return RTLD_DEFAULT;
  if (void* const loaded = dlopen(kName, RTLD_NOW | RTLD_NOLOAD); loaded != nullptr) return loaded;
  void* const library = dlopen(path.empty() ? kName : path.c_str(), RTLD_NOW);
  if (library != nullptr) return library;
  const char* const reason = dlerror();
  throw std::runtime_error(reason == nullptr ? "the loader finds none" : reason);
}

// The real numbers of which complex ones consist: sums and means are theirs.
Dtype part_of(Dtype dtype) {
  if (dtype == Dtype::kComplex64) return Dtype::kFloat32;
  return dtype == Dtype::kComplex128 ? Dtype::kFloat64 : dtype;
}

}  // namespace

NcclLibrary::NcclLibrary(const std::string& path) : library_(open_library(path)) {}

FunctionAddress NcclLibrary::find(const char* name, bool is_optional) const {
  void* const found = dlsym(library_, name);
  if (found == nullptr && !is_optional) throw std::runtime_error("it has no function " + std::string(name));
  return {found};
}

int NcclLibrary::version() const {
  int number = 0;
  require(ncclGetVersion(&number));
  return number;
}

void NcclLibrary::require(int result) const {
  if (result == 0) return;
  const char* const reason = ncclGetLastError(nullptr);
  std::string text = "NCCL: " + std::string(ncclGetErrorString(result));
  if (reason != nullptr && *reason != '\0') text += " (" + std::string(reason) + ")";
  throw std::runtime_error(text);
}

std::optional<NcclType> nccl_reduction(ReduceOp op, Dtype dtype) {
  if (!supports(op, dtype)) return std::nullopt;
  if (dtype == Dtype::kBool) {  // as bytes
    const ReduceOp bits = combining(op, dtype);
    if (bits == ReduceOp::kBxor) return std::nullopt;
    return NcclType{kNcclBytes.number, 1, row_of(bits == ReduceOp::kBand ? ReduceOp::kMin : ReduceOp::kMax).nccl};
  }
  const bool is_scaled = op == ReduceOp::kAvg || op == ReduceOp::kPremulSum;
  const Dtype element = op == ReduceOp::kSum || is_scaled ? part_of(dtype) : dtype;
  const int number = row_of(op).nccl;
  if (row_of(element).nccl == kNotInNccl || (number == kNotInNccl && op != ReduceOp::kPremulSum)) return std::nullopt;
  if (is_scaled && row_of(element).kind != kFloats) return std::nullopt;
  return NcclType{row_of(element).nccl, dtype_size(element), number};
}

bool nccl_supports(OpKind op, Dtype dtype, ReduceOp reduce_op) {
  const OperationRow& row = row_of(op);
  if (row.reduces) return row.sources == Sources::kAll && nccl_reduction(reduce_op, dtype).has_value();
  return row.input != Arrays::kNone || row.output != Arrays::kNone;
}

}  // namespace procgroup
