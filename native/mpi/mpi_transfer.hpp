// One call whose bytes MPI moves: a request of MPI, with what comes before and after it.
//
//     start    join the blocks of this rank, if they are not in one array, and widen halves to float32
//     test     until MPI has completed the request
//     finish   divide an average, round halves, and put what has come where it belongs
//
// MPI reduces most calls itself. It does not keep the order of the ranks where that was promised, and has no exact mean
// of integers: such calls are *gathered*. MPI moves the elements of all ranks to those that get the result, and these
// reduce them.
//
// All ranks start the same function of MPI: the choice depends only on what they have agreed on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mpi/mpi_library.hpp"
#include "ops/request.hpp"

namespace procgroup {

// A communicator of MPI, whose ranks are those of a group.
struct MpiCommunicator {
  std::shared_ptr<const MpiLibrary> library;
  Word handle = 0;
  int rank = 0;
  int size = 1;
  uint64_t largest_tag = 32767;
};

class MpiTransfer final : public Task {
 public:
  // All of these, and the memory of the request's arrays, outlive the transfer; the memory also while it is pending.
  MpiTransfer(const MpiCommunicator& communicator, const Request& request, bool in_rank_order)
      : mpi_(communicator),
        request_(request),
        in_rank_order_(in_rank_order),
        result_(static_cast<std::byte*>(request.output)) {}

  // MPI is called by the tests alone: the first one starts the request. After the transfer has completed, each lets MPI
  // go on with what other ranks may still need of this one. An error of MPI is thrown one second later: if a lost
  // process is the reason, the engine has found it by then, and has ended the call.
  void start(int root, uint64_t number) override {
    root_ = root;
    number_ = number;
  }
  State test(std::vector<int>& awaited) override;
  int64_t longest_sleep_ns() const override { return 0; }
  // Whether MPI may still read or write the memory of the call.
  bool is_pending() const { return phase_ == Phase::kPending; }
  // Whether the call has more elements than the library can count.
  static bool is_too_large(const MpiLibrary& library, const Request& request);

 private:
  enum class Phase { kNew, kPending, kCompleted };

  bool move();
  void begin();
  void start_reduction(int root);
  void start_reduce_scatter();
  void start_gathered(int root);
  void start_movement(int root);
  void finish(int root);
  void reduce_gathered();
  void copy_out();

  template <class... Words>
  void call(MpiFunction function, Words... words);
  const void* list(const std::vector<int64_t>& numbers);
  std::byte* scratch(size_t bytes);
  std::byte* copied(const void* elements, size_t bytes);
  std::byte* joined(const std::vector<Block>& blocks);
  std::byte* room_for(const std::vector<Block>& blocks);
  size_t result_count() const;
  bool is_widened() const;
  bool is_gathered() const;
  size_t element_bytes() const { return dtype_size(call_.dtype); }
  Word moved() const { return mpi_.library->moved(call_.dtype); }
  Word reduced() const;
  Word operation() const;
  const void* in_place() const { return mpi_.library->handles().in_place; }

  const MpiCommunicator& mpi_;
  const Request& request_;
  const Descriptor& call_ = request_.descriptor;
  const bool in_rank_order_;  // a reduction combines in the order of the ranks
  Phase phase_ = Phase::kNew;
  int root_ = -1;
  uint64_t number_ = 0;
  bool is_lost_ = false;
  std::string error_;
  int64_t error_ns_ = 0;           // when MPI reported it
  Word handle_ = 0;                // of MPI's request
  std::byte* result_;              // where MPI puts what this rank gets
  std::byte* gathered_ = nullptr;  // the elements of all ranks, to be reduced
  std::vector<std::unique_ptr<std::byte[]>> scratch_;
  std::vector<std::vector<int64_t>> long_lists_;
  std::vector<std::vector<int32_t>> lists_;
};

}  // namespace procgroup
