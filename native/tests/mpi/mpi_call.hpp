// One call of the stand-in for MPI (threads_as_mpi.hpp): what the ranks pass to a function, what the function does with
// it, and what the MPI standard demands of it. The program ends where a rank does something else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "dtype/dtype.hpp"
#include "mpi/mpi_library.hpp"
#include "ops/operations.hpp"

namespace procgroup::testing {

#ifdef PROCGROUP_LARGE_COUNTS
using Count = int64_t;
using Handle = int64_t;
inline constexpr Handle kFirstHandle = 0x7f00'0000'0000;
#else
using Count = int32_t;
using Handle = int32_t;
inline constexpr Handle kFirstHandle = static_cast<Handle>(0x8400'0000);  // negative, as some of MPICH
#endif

inline constexpr Handle kTypes = kFirstHandle + 0x100;
inline constexpr Handle kMovedTypes = kFirstHandle + 0x200;
inline constexpr Handle kMpiOperations = kFirstHandle + 0x300;
inline constexpr Handle kOwnOperations = kFirstHandle + 0x400;
inline constexpr Word kInPlace = ~Word{0};

// This MPI takes some unsigned integers for signed ones, as MPICH 4.0 does.
inline bool is_wrong(ReduceOp op, Dtype dtype) {
  return dtype == Dtype::kUint16 && (op == ReduceOp::kMin || op == ReduceOp::kMax);
}

inline bool is_rooted(OpKind op) { return row_of(op).givers == Ranks::kRoot || row_of(op).takers == Ranks::kRoot; }

struct Segment {
  std::byte* data;
  size_t bytes;

  bool overlaps(const Segment& other) const {
    return data < other.data + other.bytes && other.data < data + bytes && bytes != 0 && other.bytes != 0;
  }
};

// The memory that a rank gives to MPI: one block, blocks of one size, or of the sizes in `counts`, which MPI reads
// until the request has completed.
struct Buffer {
  void* address = nullptr;
  Count count = 0;
  Handle type = kMovedTypes;
  const Count* counts = nullptr;
  const Count* offsets = nullptr;

  bool is_in_place() const { return reinterpret_cast<Word>(address) == kInPlace; }
  size_t element_bytes() const {
    if (type >= kMovedTypes && type < kMovedTypes + 5) return size_t{1} << (type - kMovedTypes);
    return type >= kTypes && type < kTypes + kDtypes ? dtype_size(static_cast<Dtype>(type - kTypes)) : 0;
  }
  Count count_of(size_t block) const { return counts == nullptr ? count : counts[block]; }
  Count offset_of(size_t block) const {
    if (offsets != nullptr) return offsets[block];
    Count offset = 0;
    for (size_t before = 0; before < block; ++before) offset += count_of(before);
    return offset;
  }
  Segment block(size_t index) const {
    const size_t bytes = static_cast<size_t>(count_of(index)) * element_bytes();
    return {static_cast<std::byte*>(address) + static_cast<size_t>(offset_of(index)) * element_bytes(), bytes};
  }
};

// What one rank passes to a function. A broadcast has one buffer, for both directions.
struct Arguments {
  const char* function;
  OpKind op;
  Buffer send;
  Buffer receive;
  int root = -1;  // of a message: the tag
  Handle operation = 0;

  void demand(bool condition, int rank, const char* what) const {
    if (condition) return;
    std::fprintf(stderr, "%s on rank %d: expected %s\n", function, rank, what);
    std::abort();
  }
  std::vector<Segment> read(size_t rank, size_t size) const {
    if (!gives(op, static_cast<int>(rank), root)) return {};
    if (send.is_in_place()) return reduces(op) ? std::vector{receive.block(0)} : std::vector<Segment>{};
    return blocks(send, has_input_blocks(op) ? size : 1, rank, receive.is_in_place());
  }
  std::vector<Segment> written(size_t rank, size_t size) const {
    if (!takes(op, static_cast<int>(rank), root) && op != OpKind::kExscan) return {};
    if (receive.is_in_place()) return {};
    return blocks(receive, has_output_blocks(op) ? size : 1, rank, has_output_blocks(op) && send.is_in_place());
  }
  static std::vector<Segment> blocks(const Buffer& buffer, size_t count, size_t own, bool without_own) {
    std::vector<Segment> segments;
    for (size_t index = 0; index < count; ++index)
      if (index != own || !without_own) segments.push_back(buffer.block(index));
    return segments;
  }
};

using OwnOperation = void (*)(void* lower, void* both, int* count, Handle* type);

// What all ranks of a communicator do together, or a sender and a receiver.
class Call {
 public:
  Call(size_t size, unsigned seed) : parts_(size), random_(seed) {}

  void join(size_t rank, const Arguments& arguments) {
    arguments.demand(parts_[rank].function == nullptr, static_cast<int>(rank), "to join a call once");
    parts_[rank] = {arguments, contents(arguments.read(rank, parts_.size()))};
    ++joined_;
  }
  bool is_complete() const { return joined_ == parts_.size(); }
  void move_once(const std::vector<OwnOperation>& operations) {
    if (std::exchange(moved_, true)) return;
    for (size_t rank = 0; rank < parts_.size(); ++rank) check(rank);
    reduces(parts_[0].op) ? reduce(operations) : move();
  }

 private:
  struct Part : Arguments {
    std::vector<std::byte> given;  // when it started
  };

  static std::vector<std::byte> contents(const std::vector<Segment>& segments) {
    std::vector<std::byte> bytes;
    for (const Segment& segment : segments) bytes.insert(bytes.end(), segment.data, segment.data + segment.bytes);
    return bytes;
  }

  void check(size_t rank) const {
    const Part& part = parts_[rank];
    const Part& first = parts_[0];
    const auto demand = [&](bool condition, const char* what) { part.demand(condition, static_cast<int>(rank), what); };
    if (!is_message(part.op)) {
      demand(std::string_view(part.function) == first.function, "one function on all ranks");
      demand(part.root == first.root && part.operation == first.operation, "one root and operation on all ranks");
      demand(!is_rooted(part.op) || (part.root >= 0 && static_cast<size_t>(part.root) < parts_.size()),
             "a root in the group");
    }
    check_in_place(rank);
    const std::vector<Segment> read = part.read(rank, parts_.size());
    const std::vector<Segment> written = part.written(rank, parts_.size());
    for (const std::vector<Segment>& segments : {read, written})
      for (const Segment& segment : segments)
        demand(segment.data != nullptr || segment.bytes == 0, "memory for the elements");
    demand(part.send.element_bytes() != 0 && part.receive.element_bytes() != 0, "a datatype");
    demand(contents(read) == part.given, "an input that does not change while the request is pending");
    for (size_t one = 0; one < written.size(); ++one) {
      const auto overlaps = [&](const Segment& other) { return written[one].overlaps(other); };
      demand(std::none_of(written.begin() + static_cast<ptrdiff_t>(one) + 1, written.end(), overlaps),
             "output blocks that do not overlap");
      demand(part.send.is_in_place() || std::ranges::none_of(read, overlaps), "input and output that do not overlap");
    }
  }

  void check_in_place(size_t rank) const {
    const Part& part = parts_[rank];
    const bool is_root = part.root == static_cast<int>(rank);
    const bool sends = part.op == OpKind::kAllReduce || part.op == OpKind::kScan ||
                       ((part.op == OpKind::kReduce || part.op == OpKind::kGather) && is_root);
    part.demand(sends || !part.send.is_in_place(), static_cast<int>(rank), "an input that is not MPI_IN_PLACE");
    const bool receives = part.op == OpKind::kScatter && is_root;
    part.demand(receives || !part.receive.is_in_place(), static_cast<int>(rank), "an output that is not MPI_IN_PLACE");
    const bool differs = part.send.is_in_place() != parts_[0].send.is_in_place();
    part.demand(part.op != OpKind::kAllReduce || !differs, static_cast<int>(rank), "MPI_IN_PLACE on all ranks or none");
  }

  void move() const {
    for (size_t from = 0; from < parts_.size(); ++from)
      for (size_t to = 0; to < parts_.size(); ++to) {
        const Part& giver = parts_[from];
        const Part& taker = parts_[to];
        if (!gives(giver.op, static_cast<int>(from), giver.root)) continue;
        if (!takes(taker.op, static_cast<int>(to), taker.root)) continue;
        if (from == to && (giver.send.is_in_place() || giver.receive.is_in_place())) continue;
        const Segment source = giver.send.block(has_input_blocks(giver.op) ? to : 0);
        const Segment target = taker.receive.block(has_output_blocks(taker.op) ? from : 0);
        const bool equal = source.bytes == target.bytes && giver.send.type == taker.receive.type;
        taker.demand(equal, static_cast<int>(to), "as many elements of one datatype as their giver has");
        if (source.bytes != 0) std::memcpy(target.data, source.data, source.bytes);
      }
  }

  // From what the ranks had given when they started: the call may be in place.
  void reduce(const std::vector<OwnOperation>& operations) {
    for (size_t rank = 0; rank < parts_.size(); ++rank) {
      const Part& part = parts_[rank];
      const Buffer& buffer = part.send.is_in_place() ? part.receive : part.send;
      const Buffer& first = parts_[0].send.is_in_place() ? parts_[0].receive : parts_[0].send;
      bool equal = buffer.type == first.type;
      for (size_t block = 0; block < (has_input_blocks(part.op) ? parts_.size() : 1); ++block)
        equal = equal && buffer.count_of(block) == first.count_of(block);
      part.demand(equal, static_cast<int>(rank), "as many elements of one datatype on all ranks");
    }
    for (size_t rank = 0; rank < parts_.size(); ++rank) {
      const Part& part = parts_[rank];
      const std::vector<Segment> written = part.written(rank, parts_.size());
      if (written.empty()) continue;
      const Segment result = written[0];
      const int sources = sources_of(part.op, static_cast<int>(rank), static_cast<int>(parts_.size()));
      if (sources == 0) {  // what MPI leaves open
        if (result.bytes != 0) std::memset(result.data, 0xee, result.bytes);
        continue;
      }
      const Segment own = has_input_blocks(part.op) ? part.send.block(rank) : Segment{nullptr, part.given.size()};
      part.demand(own.bytes == result.bytes, static_cast<int>(rank), "an output as large as its input");
      const auto begin =
          has_input_blocks(part.op) ? own.data - static_cast<std::byte*>(part.send.address) : ptrdiff_t{0};
      if (result.bytes != 0) combine(part, begin, sources, result, operations);
    }
  }

  // All operations commute: in any order.
  void combine(const Part& part, ptrdiff_t begin, int sources, Segment result,
               const std::vector<OwnOperation>& operations) {
    std::vector<size_t> order(static_cast<size_t>(sources));
    for (size_t place = 0; place < order.size(); ++place) order[place] = place;
    std::ranges::shuffle(order, random_);
    std::vector<std::byte> lower(result.bytes);
    std::vector<std::byte> both(result.bytes);
    std::memcpy(both.data(), parts_[order[0]].given.data() + begin, result.bytes);
    for (size_t place = 1; place < order.size(); ++place) {
      lower.swap(both);
      std::memcpy(both.data(), parts_[order[place]].given.data() + begin, result.bytes);
      combine_two(part, lower.data(), both.data(), result.bytes, operations);
    }
    std::memcpy(result.data, both.data(), result.bytes);
  }

  void combine_two(const Part& part, std::byte* lower, std::byte* both, size_t bytes,
                   const std::vector<OwnOperation>& operations) {
    Handle type = part.send.type;
    const size_t element_bytes = part.send.element_bytes();
    const auto own = static_cast<size_t>(part.operation - kOwnOperations);
    if (part.operation >= kOwnOperations && own < operations.size()) {
      for (size_t left = bytes / element_bytes; left != 0;) {  // of so many elements at once as MPI chooses
        int count = static_cast<int>(std::min<size_t>(left, 1 + random_() % 700));
        operations[own](lower, both, &count, &type);
        lower += static_cast<size_t>(count) * element_bytes;
        both += static_cast<size_t>(count) * element_bytes;
        left -= static_cast<size_t>(count);
      }
      return;
    }
    const bool known = part.operation >= kMpiOperations && part.operation < kMpiOperations + kReduceOps;
    part.demand(known, 0, "an operation");
    part.demand(type < kMovedTypes, 0, "a datatype of numbers");
    const auto op = static_cast<ReduceOp>(part.operation - kMpiOperations);
    const auto dtype = static_cast<Dtype>(type - kTypes);
    const bool is_short = !is_inexact(dtype) && dtype_size(dtype) <= 2;
    part.demand(supports(op, dtype), 0, "an operation of this datatype");
    part.demand(!(is_inexact(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax)), 0,
                "an operation that says what a NaN gives");
    part.demand(!(is_short && op == ReduceOp::kSum), 0, "an operation that says what an overflow gives");
    part.demand(!is_wrong(op, dtype), 0, "an operation that gives the right result");
    const void* const sources[] = {lower, both};
    procgroup::reduce(dtype, op, both, sources, 2, bytes / element_bytes);
  }

  std::vector<Part> parts_;
  std::minstd_rand random_;
  size_t joined_ = 0;
  bool moved_ = false;
};

}  // namespace procgroup::testing
