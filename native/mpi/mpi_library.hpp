// An MPI library that this process has loaded, called without its header.
//
// The handles of MPI (communicators, datatypes, operations, requests) are integers in MPICH and its relatives, and
// pointers in Open MPI. Both are passed in one 64-bit register on the processors that procgroup supports, little-endian
// x86-64 and AArch64, where a function that takes an `int` reads the lower half. So every argument here is one *word*,
// and a request has a word of memory. mpi4py, which has the header, starts MPI and gives the handles.
//
// Of functions with counts, the one for large counts (MPI 4, "MPI_Iallreduce_c") is taken where the library has it: its
// counts and displacements are 64 bits wide, those of the other one 32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "base/function_address.hpp"
#include "dtype/dtype.hpp"

namespace procgroup {

using Word = uint64_t;

enum class MpiFunction : uint8_t {
  kIbcast,
  kIreduce,
  kIallreduce,
  kIscan,
  kIexscan,
  kIgather,
  kIscatter,
  kIallgather,
  kIallgatherv,
  kIreduceScatterBlock,
  kIreduceScatter,
  kIalltoallv,
  kIsend,
  kIrecv,
};
inline constexpr size_t kMpiFunctions = 14;

// The handles and numbers that the library's header defines. A datatype or operation that it lacks is 0.
struct MpiHandles {
  const void* in_place = nullptr;
  std::array<Word, kDtypes> datatypes{};  // for reductions; a bool is one byte
  std::array<Word, 5> moved{};            // of 1, 2, 4, 8 and 16 bytes
  std::array<Word, kReduceOps> operations{};
  std::vector<int> lost;  // the error classes of ULFM: a process has failed, a revoked communicator
};

class MpiLibrary {
 public:
  // `path` is a loaded library that uses MPI. Throws std::runtime_error for what it does not find.
  MpiLibrary(const std::string& path, MpiHandles handles);

  const MpiHandles& handles() const { return handles_; }
  bool has_large_counts() const { return large_; }
  // Finalize MPI in a thread of its own, if that has not begun, and wait for it; false when it has not ended after
  // `seconds`: it waits for all processes.
  bool finalize(double seconds) const;

  // Start what the function does; the last argument, the address of `request`, is added. False where a process is lost:
  // the engine finds and names it. Throws std::runtime_error, with the library's text, for any other error.
  template <class... Words>
  bool start(MpiFunction function, Word& request, Words... words) const {
    using Function = int (*)(Widened<Words>..., Word*);
    return succeeded(
        reinterpret_cast<Function>(functions_[static_cast<size_t>(function)])(widened(words)..., &request));
  }
  enum class State { kPending, kCompleted, kLost };
  State test(Word& request) const;
  // Advance MPI's pending operations on this rank, by an MPI_Iprobe on the communicator.
  void progress(Word communicator) const;
  // The operation that combines prepared elements as dtype/dtype.hpp says: MPI's, or our own where MPI's gives
  // something else. 0 where there is none.
  Word operation(ReduceOp op, Dtype dtype) const;
  // The datatype for elements that are only moved.
  Word moved(Dtype dtype) const;

 private:
  template <class Argument>
  using Widened = Word;
  static Word widened(Word value) { return value; }
  static Word widened(int value) { return static_cast<Word>(static_cast<int64_t>(value)); }
  static Word widened(const void* address) { return reinterpret_cast<Word>(address); }
  bool is_right(ReduceOp op, Dtype dtype) const;
  // False where a process is lost; throws for any other error.
  bool succeeded(int code) const;

  FunctionAddress find(const std::string& name) const;

  MpiHandles handles_;
  void* const library_;
  bool large_ = true;
  std::array<void*, kMpiFunctions> functions_{};
  int (*finalize_)() = find("MPI_Finalize");
  mutable std::future<void> finalized_;
  int (*test_)(Word* request, int* flag, void* status) = find("MPI_Test");
  int (*probe_)(Word source, Word tag, Word communicator, int* flag, void* status) = find("MPI_Iprobe");
  int (*reduce_local_)(const void* lower, void* both, int count, Word datatype,
                       Word operation) = find("MPI_Reduce_local");
  int (*error_class_)(int code, int* error_class) = find("MPI_Error_class");
  int (*error_string_)(int code, char* text, int* length) = find("MPI_Error_string");
  std::array<std::array<Word, kDtypes>, kReduceOps> own_{};
};

}  // namespace procgroup
