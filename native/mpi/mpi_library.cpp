#include "mpi/mpi_library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <span>
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

void* loaded_library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error(path + " is not loaded");
  return library;
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

template <size_t... kNumbers>
constexpr std::array<Combine, sizeof...(kNumbers)> combine_functions(std::index_sequence<kNumbers...>) {
  return {&combine<static_cast<Dtype>(kNumbers % kDtypes), static_cast<ReduceOp>(kNumbers / kDtypes)>...};
}

Combine own_combine(ReduceOp op, Dtype dtype) {
  static constexpr auto kFunctions = combine_functions(std::make_index_sequence<size_t{kReduceOps} * kDtypes>());
  return kFunctions[static_cast<size_t>(op) * kDtypes + static_cast<size_t>(dtype)];
}

// Where MPI leaves the result open: what a NaN gives, and which zero is smaller. Open MPI 5.0 saturates sums of short
// integers, sometimes.
bool is_left_open(ReduceOp op, Dtype dtype) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return is_inexact(dtype);
  return op == ReduceOp::kSum && !is_inexact(dtype) && dtype_size(dtype) <= 2;
}

template <class Number>
std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}

// Elements whose results are exact, and for integers both ends of their range.
std::vector<std::byte> samples(Dtype dtype) {
  if (dtype == Dtype::kFloat32) return bytes_of(std::vector<float>{0, 1, -1, 2, 0.5F, -3, 1000});
  if (dtype == Dtype::kFloat64) return bytes_of(std::vector<double>{0, 1, -1, 2, 0.5, -3, 1000});
  if (dtype == Dtype::kComplex64) return bytes_of(std::vector<float>{1, 2, -3, 0.5F, 2, -1});
  if (dtype == Dtype::kComplex128) return bytes_of(std::vector<double>{1, 2, -3, 0.5, 2, -1});
  if (dtype == Dtype::kBool) return {std::byte{0}, std::byte{1}};
  std::vector<std::byte> elements;
  const size_t bytes = dtype_size(dtype);
  const uint64_t lowest = uint64_t{1} << (8 * bytes - 1);  // of the signed type
  for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{7}, ~uint64_t{0}, lowest, lowest - 1}) {
    const auto all = std::as_bytes(std::span(&value, 1));  // the lowest first
    elements.insert(elements.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(bytes));
  }
  return elements;
}

}  // namespace

FunctionAddress MpiLibrary::find(const std::string& name) const {
  void* const address = dlsym(library_, name.c_str());
  if (address == nullptr) throw std::runtime_error("the MPI library has no function " + name);
  return {address};
}

MpiLibrary::MpiLibrary(const std::string& path, MpiHandles handles)
    : handles_(std::move(handles)), library_(loaded_library(path)) {
  for (const char* name : kNames) large_ = large_ && dlsym(library_, (std::string(name) + "_c").c_str()) != nullptr;
  for (size_t index = 0; index < kMpiFunctions; ++index)
    functions_[index] = find(kNames[index] + std::string(large_ ? "_c" : "")).value;
  int (*const create)(Combine, int commutes, Word* operation) = find("MPI_Op_create");
  for (int number = 0; number < kReduceOps * kDtypes; ++number) {
    const auto op = static_cast<ReduceOp>(number / kDtypes);
    const auto dtype = static_cast<Dtype>(number % kDtypes);
    if (!supports(op, dtype) || combining(op, dtype) != op || is_right(op, dtype)) continue;
    succeeded(create(own_combine(op, dtype), 1, &own_[static_cast<size_t>(op)][static_cast<size_t>(dtype)]));
  }
}

// Whether MPI's operation gives what ours gives. MPICH 4.0 takes unsigned integers for signed ones in MIN and MAX.
bool MpiLibrary::is_right(ReduceOp op, Dtype dtype) const {
  const Word operation = handles_.operations[static_cast<size_t>(op)];
  const Word datatype = handles_.datatypes[static_cast<size_t>(dtype)];
  if (is_left_open(op, dtype)) return false;
  if (operation == 0 || datatype == 0) return true;  // it is never asked for
  const std::vector<std::byte> elements = samples(dtype);
  const size_t bytes = dtype_size(dtype);
  const size_t count = elements.size() / bytes;
  std::vector<std::byte> lower;  // each element with each
  std::vector<std::byte> both;
  for (size_t number = 0; number < count * count; ++number) {
    const auto first = elements.begin() + static_cast<ptrdiff_t>(number / count * bytes);
    const auto second = elements.begin() + static_cast<ptrdiff_t>(number % count * bytes);
    lower.insert(lower.end(), first, first + static_cast<ptrdiff_t>(bytes));
    both.insert(both.end(), second, second + static_cast<ptrdiff_t>(bytes));
  }
  std::vector<std::byte> expected(both.size());
  const void* const sources[] = {lower.data(), both.data()};
  reduce(dtype, op, expected.data(), sources, 2, count * count);
  succeeded(reduce_local_(lower.data(), both.data(), static_cast<int>(count * count), datatype, operation));
  return both == expected;
}

MpiLibrary::State MpiLibrary::test(Word& request) const {
  alignas(std::max_align_t) std::byte status[kLargestStatus];
  int flag = 0;
  if (!succeeded(test_(&request, &flag, status))) return State::kLost;
  return flag != 0 ? State::kCompleted : State::kPending;
}

// The source and the tag are any valid ones: the result of the probe is not used.
void MpiLibrary::progress(Word communicator) const {
  alignas(std::max_align_t) std::byte status[kLargestStatus];
  int flag = 0;
  succeeded(probe_(0, 0, communicator, &flag, status));
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
  op = combining(op, dtype);
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
