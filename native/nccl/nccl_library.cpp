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

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error("it has no function " + std::string(name));
}

constexpr int kNone = -1;

// NCCL's number of a type that it reduces.
int number_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kInt8:
      return 0;
    case Dtype::kUint8:
      return 1;
    case Dtype::kInt32:
      return 2;
    case Dtype::kUint32:
      return 3;
    case Dtype::kInt64:
      return 4;
    case Dtype::kUint64:
      return 5;
    case Dtype::kFloat16:
      return 6;
    case Dtype::kFloat32:
      return 7;
    case Dtype::kFloat64:
      return 8;
    case Dtype::kBfloat16:
      return 9;
    default:
      return kNone;
  }
}

bool is_float(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64;
}

// The real numbers of which complex ones consist: sums and means are theirs.
Dtype part_of(Dtype dtype) {
  if (dtype == Dtype::kComplex64) return Dtype::kFloat32;
  return dtype == Dtype::kComplex128 ? Dtype::kFloat64 : dtype;
}

}  // namespace

NcclLibrary::NcclLibrary(const std::string& path) {
  void* const library = open_library(path);
#define PROCGROUP_FIND(NAME) find(library, NAME, #NAME)
  PROCGROUP_FIND(ncclGetVersion);
  PROCGROUP_FIND(ncclGetErrorString);
  PROCGROUP_FIND(ncclGetLastError);
  PROCGROUP_FIND(ncclGetUniqueId);
  PROCGROUP_FIND(ncclCommInitRankConfig);
  PROCGROUP_FIND(ncclCommGetAsyncError);
  PROCGROUP_FIND(ncclCommFinalize);
  PROCGROUP_FIND(ncclCommDestroy);
  PROCGROUP_FIND(ncclCommAbort);
  PROCGROUP_FIND(ncclGroupStart);
  PROCGROUP_FIND(ncclGroupEnd);
  PROCGROUP_FIND(ncclAllReduce);
  PROCGROUP_FIND(ncclBroadcast);
  PROCGROUP_FIND(ncclReduce);
  PROCGROUP_FIND(ncclAllGather);
  PROCGROUP_FIND(ncclReduceScatter);
  PROCGROUP_FIND(ncclSend);
  PROCGROUP_FIND(ncclRecv);
  PROCGROUP_FIND(ncclRedOpCreatePreMulSum);
  PROCGROUP_FIND(ncclRedOpDestroy);
  PROCGROUP_FIND(ncclMemAlloc);
  PROCGROUP_FIND(ncclMemFree);
#undef PROCGROUP_FIND
  ncclCommWindowRegister = reinterpret_cast<decltype(ncclCommWindowRegister)>(dlsym(library, "ncclCommWindowRegister"));
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
  if (number_of(element) == kNone || (number == kNotInNccl && op != ReduceOp::kPremulSum)) return std::nullopt;
  if (is_scaled && !is_float(element)) return std::nullopt;
  return NcclType{number_of(element), dtype_size(element), number};
}

bool nccl_supports(OpKind op, Dtype dtype, ReduceOp reduce_op) {
  switch (op) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      return nccl_reduction(reduce_op, dtype).has_value();
    case OpKind::kBroadcast:
    case OpKind::kGather:
    case OpKind::kAllGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kSend:
    case OpKind::kRecv:
      return true;
    default:
      return false;
  }
}

}  // namespace procgroup
