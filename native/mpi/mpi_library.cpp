#include "mpi/mpi_library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "base/native_thread.hpp"

namespace procgroup {
namespace {

// By MpiFunction.
constexpr std::array<const char*, kMpiFunctions> kNames = {
    "MPI_Ibcast",          "MPI_Ireduce",    "MPI_Iallreduce", "MPI_Iscan",       "MPI_Iexscan",
    "MPI_Igather",         "MPI_Iscatter",   "MPI_Iallgather", "MPI_Iallgatherv", "MPI_Ireduce_scatter_block",
    "MPI_Ireduce_scatter", "MPI_Ialltoallv", "MPI_Isend",      "MPI_Irecv",
};

constexpr size_t kLongestText = 4096;
constexpr size_t kLargestStatus = 256;  // an MPI_Status takes some 20 to 40 bytes

template <class Function>
Function found(void* library, const char* name) {
  void* const address = dlsym(library, name);
  if (address == nullptr) throw std::runtime_error(std::string("the MPI library has no function ") + name);
  return reinterpret_cast<Function>(address);
}

// Make every NaN the same one: MPI may combine two of them in another order on each rank.
template <class Bits, Bits kInfinity, Bits kNan>
void unify_nans(void* elements, size_t count) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() >> 1;
  auto* bytes = static_cast<std::byte*>(elements);
  for (size_t index = 0; index < count; ++index) {  // at any address
    Bits bits;
    std::memcpy(&bits, bytes + index * sizeof bits, sizeof bits);
    if ((bits & kMagnitude) > kInfinity) bits = kNan;
    std::memcpy(bytes + index * sizeof bits, &bits, sizeof bits);
  }
}

template <Dtype kDtype>
void unify_nans_of(void* elements, size_t count) {
  if constexpr (kDtype == Dtype::kFloat32) unify_nans<uint32_t, 0x7f800000, 0x7fc00000>(elements, count);
  if constexpr (kDtype == Dtype::kFloat64)
    unify_nans<uint64_t, 0x7ff0000000000000, 0x7ff8000000000000>(elements, count);
}

// What MPI calls to combine elements: `both` becomes `lower` op `both`, where `lower` is of lower ranks.
template <Dtype kDtype, ReduceOp kOp>
void combine(void* lower, void* both, int* count, void*) {
  const void* const sources[] = {lower, both};
  reduce(kDtype, kOp, both, sources, 2, static_cast<size_t>(*count));
  unify_nans_of<kDtype>(both, static_cast<size_t>(*count));
}

using Combine = void (*)(void*, void*, int*, void*);

struct OwnOperation {
  ReduceOp op;
  Dtype dtype;
  Combine combine;
};

template <ReduceOp kOp, Dtype kDtype>
constexpr OwnOperation own() {
  return {kOp, kDtype, &combine<kDtype, kOp>};
}

// MPI leaves open what a NaN gives, and which zero is smaller; Open MPI 5.0 saturates sums of short integers.
constexpr OwnOperation kOwnOperations[] = {
    own<ReduceOp::kMin, Dtype::kFloat16>(),  own<ReduceOp::kMax, Dtype::kFloat16>(),
    own<ReduceOp::kMin, Dtype::kBfloat16>(), own<ReduceOp::kMax, Dtype::kBfloat16>(),
    own<ReduceOp::kMin, Dtype::kFloat32>(),  own<ReduceOp::kMax, Dtype::kFloat32>(),
    own<ReduceOp::kMin, Dtype::kFloat64>(),  own<ReduceOp::kMax, Dtype::kFloat64>(),
    own<ReduceOp::kSum, Dtype::kInt8>(),     own<ReduceOp::kSum, Dtype::kUint8>(),
    own<ReduceOp::kSum, Dtype::kInt16>(),    own<ReduceOp::kSum, Dtype::kUint16>(),
};

}  // namespace

MpiLibrary::MpiLibrary(const std::string& path, MpiHandles handles) : handles_(std::move(handles)) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error(path + " is not loaded");
  for (const char* name : kNames) large_ = large_ && dlsym(library, (std::string(name) + "_c").c_str()) != nullptr;
  for (size_t index = 0; index < kMpiFunctions; ++index)
    functions_[index] = found<void*>(library, (kNames[index] + std::string(large_ ? "_c" : "")).c_str());
  finalize_ = found<decltype(finalize_)>(library, "MPI_Finalize");
  test_ = found<decltype(test_)>(library, "MPI_Test");
  error_class_ = found<decltype(error_class_)>(library, "MPI_Error_class");
  error_string_ = found<decltype(error_string_)>(library, "MPI_Error_string");
  const auto create = found<int (*)(Combine, int commutes, Word* operation)>(library, "MPI_Op_create");
  for (const OwnOperation& own : kOwnOperations)
    succeeded(create(own.combine, 1, &own_[static_cast<size_t>(own.op)][static_cast<size_t>(own.dtype)]));
}

MpiLibrary::State MpiLibrary::test(Word& request) const {
  alignas(std::max_align_t) std::byte status[kLargestStatus];
  int flag = 0;
  if (!succeeded(test_(&request, &flag, status))) return State::kLost;
  return flag != 0 ? State::kCompleted : State::kPending;
}

// The thread is not waited for by any destructor: it may never end.
bool MpiLibrary::finalize(double seconds) const {
  if (!finalized_.valid()) {
    std::promise<void> promise;
    finalized_ = promise.get_future();
    start_native_thread("pg-mpi-end", [finalize = finalize_, promise = std::move(promise)]() mutable {
      finalize();
      promise.set_value();
    }).detach();
  }
  return finalized_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
}

Word MpiLibrary::operation(ReduceOp op, Dtype dtype) const {
  if (dtype == Dtype::kBool && (op == ReduceOp::kSum || op == ReduceOp::kMax)) op = ReduceOp::kBor;
  if (dtype == Dtype::kBool && (op == ReduceOp::kProduct || op == ReduceOp::kMin)) op = ReduceOp::kBand;
  const Word own = own_[static_cast<size_t>(op)][static_cast<size_t>(dtype)];
  return own != 0 ? own : handles_.operations[static_cast<size_t>(op)];
}

Word MpiLibrary::moved(Dtype dtype) const {
  size_t place = 0;
  for (size_t bytes = dtype_size(dtype); bytes > 1; bytes /= 2) ++place;
  return handles_.moved[place];
}

bool MpiLibrary::succeeded(int code) const {
  if (code == 0) return true;
  int error_class = 0;
  error_class_(code, &error_class);
  if (std::ranges::find(handles_.lost, error_class) != handles_.lost.end()) return false;
  std::string text(kLongestText, '\0');
  int length = 0;
  error_string_(code, text.data(), &length);
  text.resize(static_cast<size_t>(length));
  throw std::runtime_error("MPI: " + text);
}

}  // namespace procgroup
