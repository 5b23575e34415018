// A call for MPI to move, one rank's part in it, and what it must end with.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "dtype/kernels.hpp"
#include "mpi/mpi_transfer.hpp"
#include "tests/check.hpp"
#include "tests/mpi/mpi_call.hpp"

namespace procgroup::testing {

using Bytes = std::vector<std::byte>;

inline constexpr size_t kGapBytes = 3;
inline constexpr std::byte kUntouched{0xa5};

// How many elements one rank has for another.
enum class Shares : uint8_t { kEqual, kUneven, kForLowerRanks };
// Which ranks have their own input and output block in one place.
enum class InPlace : uint8_t { kNone, kAll, kOddRanks };

struct Case {
  OpKind op;
  Dtype dtype = Dtype::kInt32;
  size_t count = 0;
  ReduceOp reduce_op = ReduceOp::kSum;
  Shares shares = Shares::kEqual;
  InPlace in_place = InPlace::kNone;
  int layout = 0;  // of rank 0; the next rank has the next one: bit 0, 1: its input, output blocks are in one array
  bool in_rank_order = false;
  int root = -1;

  size_t elements(int from, int to) const {
    const int either = op == OpKind::kAllGather ? from : op == OpKind::kReduceScatter ? to : from + 2 * to;
    if (shares == Shares::kForLowerRanks) return to <= from ? count : 0;
    return shares == Shares::kEqual ? count : count * static_cast<size_t>((either + 1) % 3) / 2;
  }
  bool is_in_place(int rank) const { return in_place == InPlace::kAll || (in_place == InPlace::kOddRanks && rank % 2); }
  std::string text() const {
    return std::string(op_name(op)) + "(" + reduce_op_name(reduce_op) + ") of " + std::to_string(count) + " " +
           dtype_name(dtype) + ", shares " + std::to_string(static_cast<int>(shares)) + ", in place " +
           std::to_string(static_cast<int>(in_place)) + ", layout " + std::to_string(layout) + ", in rank order " +
           std::to_string(in_rank_order) + ", root " + std::to_string(root);
  }
};

inline uint64_t mixed(uint64_t number) {
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

inline bool is_least_or_greatest(ReduceOp op) { return op == ReduceOp::kMin || op == ReduceOp::kMax; }

// MPI may combine in any order: numbers of which each gives the same bits, where the order was not promised.
inline double number(const Case& call, uint64_t random) {
  if (is_least_or_greatest(call.reduce_op)) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    constexpr double kSpecial[] = {0.0, -0.0, 1.5, -1.5, 2.5, -2.5, kNan, -kNan};
    return kSpecial[random % std::size(kSpecial)];
  }
  if (call.in_rank_order) return static_cast<double>(static_cast<int64_t>(random)) * 0x1p-60;
  constexpr double kFactors[] = {1, 2, -1, -2};
  return call.reduce_op == ReduceOp::kProduct ? kFactors[random % 4] : static_cast<double>(random % 17) - 8;
}

template <class T>
Bytes stored(const std::vector<double>& numbers) {
  Bytes bytes(numbers.size() * sizeof(T));
  for (size_t index = 0; index < numbers.size(); ++index) {
    const auto element = static_cast<T>(numbers[index]);
    std::memcpy(bytes.data() + index * sizeof element, &element, sizeof element);
  }
  return bytes;
}

// What rank `from` gives; to rank `to`, where it gives each rank something else.
inline Bytes given(const Case& call, int from, int to) {
  const uint64_t seed = mixed(static_cast<uint64_t>(1 + from * 100 + (has_input_blocks(call.op) ? to : 50))) +
                        call.count * 10 + static_cast<uint64_t>(call.reduce_op);
  const size_t bytes = call.elements(from, to) * dtype_size(call.dtype);
  if (!reduces(call.op) || !is_inexact(call.dtype)) {
    Bytes elements(bytes);
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      const uint64_t random = mixed(seed + at) & (call.dtype == Dtype::kBool ? 0x0101010101010101 : ~uint64_t{0});
      std::memcpy(elements.data() + at, &random, std::min(sizeof random, bytes - at));
    }
    return elements;
  }
  const bool is_complex = call.dtype == Dtype::kComplex64 || call.dtype == Dtype::kComplex128;
  std::vector<double> numbers(call.elements(from, to) * (is_complex ? 2 : 1));
  for (size_t index = 0; index < numbers.size(); ++index) numbers[index] = number(call, mixed(seed + index));
  if (call.dtype == Dtype::kFloat64 || call.dtype == Dtype::kComplex128) return stored<double>(numbers);
  const Bytes floats = stored<float>(numbers);
  if (call.dtype == Dtype::kFloat32 || call.dtype == Dtype::kComplex64) return floats;
  Bytes halves(bytes);
  narrow_halves(call.dtype, halves.data(), floats.data(), numbers.size());
  return halves;
}

template <class Bits>
void unify_nans(std::byte* elements, size_t bytes, Bits infinity) {
  for (size_t at = 0; at < bytes; at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, elements + at, sizeof bits);
    if ((bits & (std::numeric_limits<Bits>::max() >> 1)) > infinity) std::memset(elements + at, 0xff, sizeof bits);
  }
}

// Make every NaN the same: reduce() leaves open which of two it gives.
inline void unify_nans(Dtype dtype, std::byte* elements, size_t bytes) {
  if (dtype == Dtype::kFloat16) unify_nans<uint16_t>(elements, bytes, 0x7c00);
  if (dtype == Dtype::kBfloat16) unify_nans<uint16_t>(elements, bytes, 0x7f80);
  if (dtype == Dtype::kFloat32) unify_nans<uint32_t>(elements, bytes, 0x7f800000);
  if (dtype == Dtype::kFloat64) unify_nans<uint64_t>(elements, bytes, 0x7ff0000000000000);
}

// What `rank` gets; from rank `from`, where each rank gives it something of its own.
inline Bytes expected(const Case& call, int from, int rank, int size) {
  if (!reduces(call.op)) return given(call, call.root >= 0 && !has_output_blocks(call.op) ? call.root : from, rank);
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (int source = 0; source < sources_of(call.op, rank, size); ++source) inputs.push_back(given(call, source, rank));
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes result(inputs[0].size());
  reduce(call.dtype, call.reduce_op, result.data(), sources.data(), static_cast<int>(sources.size()),
         call.elements(0, rank));
  return result;
}

// After a test, which lets the task go on.
inline bool has_completed(Task& task) {
  std::vector<int> awaited;
  return task.test(awaited) == Task::State::kCompleted;
}

// One rank's part: its arrays, in memory that shows what else was written, and the transfer.
class RankCall {
 public:
  RankCall(const Case& call, const MpiCommunicator& communicator)
      : call_(call), rank_(communicator.rank), size_(communicator.size) {
    describe();
    place();
    fill();
    transfer_.emplace(communicator, request_, call.in_rank_order);
    transfer_->start(request_.descriptor.root, 7);
    CHECK(!transfer_->is_pending());
  }
  RankCall(const RankCall&) = delete;
  RankCall& operator=(const RankCall&) = delete;

  bool advance() {
    const bool completed = has_completed(*transfer_);
    CHECK(transfer_->is_pending() == !completed);
    if (completed) compare();
    return completed;
  }

 private:
  struct Place {
    size_t offset;
    size_t count;
  };

  bool gives_blocks() const { return has_input_blocks(call_.op) && gives(call_.op, rank_, call_.root); }
  bool takes_blocks() const { return has_output_blocks(call_.op) && takes(call_.op, rank_, call_.root); }
  // Of all-gathers and reduce-scatters, as those of other ranks.
  size_t input_count() const { return call_.elements(rank_, rank_); }

  void describe() {
    Descriptor& descriptor = request_.descriptor;
    descriptor.op = call_.op;
    descriptor.dtype = call_.dtype;
    descriptor.reduce_op = call_.reduce_op;
    descriptor.root = call_.root;
    descriptor.external = true;
    descriptor.count = call_.op == OpKind::kAllToAll ? 0 : call_.count;
    if (row_of(call_.op).sizes != Sizes::kPerRank || call_.shares == Shares::kEqual) return;
    std::vector<Block> blocks;
    for (int rank = 0; rank < size_; ++rank) blocks.push_back({nullptr, call_.elements(rank, rank)});
    descriptor.count = 0;
    for (const Block& block : blocks) descriptor.count += block.count;
    descriptor.splits = hash_of_sizes(blocks);
  }

  size_t take(size_t count, bool is_joined) {
    if (!is_joined) end_ += kGapBytes;
    const size_t offset = end_;
    end_ += count * dtype_size(call_.dtype);
    return offset;
  }

  void place() {
    const int layout = call_.layout + rank_;
    const bool in_place = call_.is_in_place(rank_);
    const auto own = static_cast<size_t>(rank_);
    end_ += kGapBytes;
    if (gives_blocks())
      for (int to = 0; to < size_; ++to) {
        const size_t count = call_.elements(rank_, to);
        inputs_.push_back({take(count, layout & 1), count});
      }
    if (!in_place) end_ += kGapBytes;
    if (takes_blocks())
      for (int from = 0; from < size_; ++from) {
        const size_t count = call_.elements(from, rank_);
        const bool shared = in_place && from == rank_ && gives_blocks();
        outputs_.push_back({shared ? inputs_[own].offset : take(count, layout & 2), count});
      }
    if (row_of(call_.op).input == Arrays::kOne) {
      const bool shared = in_place && takes_blocks();
      inputs_.push_back({shared ? outputs_[own].offset : take(input_count(), false), input_count()});
    }
    if (row_of(call_.op).output == Arrays::kOne) {
      const bool shared = (in_place && !inputs_.empty()) || call_.op == OpKind::kBroadcast;
      const size_t input = gives_blocks() ? own : 0;
      outputs_.push_back({shared ? inputs_[input].offset : take(input_count(), false), input_count()});
    }
    end_ += kGapBytes;
  }

  void fill() {
    memory_.assign(end_, kUntouched);
    const bool has_own = call_.op != OpKind::kBroadcast || rank_ == call_.root;
    for (size_t to = 0; to < inputs_.size() && has_own; ++to)
      put(memory_, inputs_[to], given(call_, rank_, gives_blocks() ? static_cast<int>(to) : rank_));
    expected_ = memory_;
    if (takes(call_.op, rank_, call_.root))
      for (size_t from = 0; from < outputs_.size(); ++from)
        put(expected_, outputs_[from], expected(call_, static_cast<int>(from), rank_, size_));
    if (gives_blocks()) request_.inputs = blocks(inputs_);
    if (takes_blocks()) request_.outputs = blocks(outputs_);
    if (row_of(call_.op).input == Arrays::kOne) request_.input = memory_.data() + inputs_[0].offset;
    if (row_of(call_.op).output == Arrays::kOne) request_.output = memory_.data() + outputs_[0].offset;
  }
  // An empty one may have no address.
  std::vector<Block> blocks(const std::vector<Place>& places) {
    std::vector<Block> all;
    for (const Place& place : places) {
      const bool has_address = place.count != 0 || rank_ % 2 == 0;
      all.push_back({has_address ? memory_.data() + place.offset : nullptr, place.count});
    }
    return all;
  }
  static void put(Bytes& memory, const Place& place, const Bytes& elements) {
    std::ranges::copy(elements, memory.begin() + static_cast<ptrdiff_t>(place.offset));
  }

  void compare() {
    if (reduces(call_.op) && is_least_or_greatest(call_.reduce_op))
      for (const Place& output : outputs_)
        for (Bytes* memory : {&memory_, &expected_})
          unify_nans(call_.dtype, memory->data() + output.offset, output.count * dtype_size(call_.dtype));
    if (memory_ == expected_) return;
    CASE("%s", call_.text().c_str());
    CHECK_EQUAL(memory_, expected_);
  }

  const Case& call_;
  const int rank_;
  const int size_;
  std::vector<Place> inputs_;
  std::vector<Place> outputs_;
  size_t end_ = 0;
  Bytes memory_;
  Bytes expected_;
  Request request_;
  std::optional<MpiTransfer> transfer_;
};

}  // namespace procgroup::testing
