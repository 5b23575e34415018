// One rank's part in a call of any kind, with what it must end with: what the elements are tells the call, who gave
// them and to whom.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/engine_fixture.hpp"

namespace procgroup {

// Puts arrays into an arena, or where the C++ library has them.
template <class Element>
struct ArrayAllocator {
  using value_type = Element;

  Element* allocate(size_t count) const {
    const size_t bytes = count * sizeof(Element);
    if (arena == nullptr) return std::allocator<Element>().allocate(count);
    return reinterpret_cast<Element*>(arena->at(arena->allocate(bytes), bytes));
  }
  void deallocate(Element* array, size_t count) const {
    if (arena == nullptr) return std::allocator<Element>().deallocate(array, count);
    arena->release(*arena->offset_of(array, count * sizeof(Element)));
  }
  bool operator==(const ArrayAllocator&) const = default;

  Arena* arena;
};
using Array = std::vector<int64_t, ArrayAllocator<int64_t>>;

// What all ranks agree upon. `count`: elements of the largest block. In place, the input of an all_gather is its own
// output, and the root's output of a scatter its own block.
struct CallKind {
  OpKind op;
  size_t count;
  int root = 0;
  bool is_even = false;  // else blocks are unequal where they may be
  bool in_place = false;
};

inline constexpr OpKind kAllOps[] = {OpKind::kBroadcast, OpKind::kReduce,  OpKind::kAllReduce,     OpKind::kGather,
                                     OpKind::kAllGather, OpKind::kScatter, OpKind::kReduceScatter, OpKind::kAllToAll};

class AnyCall {
 public:
  // `number` makes the elements of this call differ from those of others. `arena`: the memory of the arrays; null:
  // elsewhere.
  AnyCall(CallKind kind, int64_t number, int rank, int size, Arena* arena = nullptr)
      : kind_(kind), number_(number), rank_(rank), size_(size), allocator_{arena}, array_(allocator_) {
    Descriptor& call = request_.descriptor;
    call.op = kind.op;
    call.dtype = Dtype::kInt64;
    call.count = kind.count;
    if (is_rooted()) call.root = kind.root;
    if ((kind.op == OpKind::kAllGather || kind.op == OpKind::kReduceScatter) && !kind.is_even) {
      call.splits = kind.count + 1;
      call.count = 0;
      for (int peer = 0; peer < size; ++peer) call.count += count(peer);
    }
    if (kind.op == OpKind::kAllToAll) call.count = 0;
    give();
    take();
  }
  AnyCall(const AnyCall&) = delete;

  Request& request() { return request_; }
  const std::vector<Array>& outputs() const { return outputs_; }
  // Whether the arrays hold what the call should have put there.
  bool is_right() const {
    for (size_t from = 0; from < outputs_.size(); ++from)
      if (outputs_[from] != given(static_cast<int>(from), has_input_blocks(kind_.op) ? rank_ : 0)) return false;
    return array_ == expected();
  }
  // As users do: overwrite the input as soon as the call has completed.
  void overwrite() {
    std::ranges::fill(array_, -1);
    for (Array& input : inputs_) std::ranges::fill(input, -1);
  }

 private:
  bool is_root() const { return rank_ == kind_.root; }
  bool is_rooted() const {
    return kind_.op == OpKind::kBroadcast || kind_.op == OpKind::kReduce || kind_.op == OpKind::kGather ||
           kind_.op == OpKind::kScatter;
  }
  size_t count(int peer) const { return peer % 2 == 1 && !kind_.is_even ? kind_.count / 3 : kind_.count; }
  size_t count(int from, int to) const {
    switch (kind_.op) {
      case OpKind::kAllGather:
        return count(from);
      case OpKind::kReduceScatter:
        return count(to);
      case OpKind::kAllToAll:
        return !kind_.is_even && (from + 2 * to) % 5 == 1 ? 0 : count(from + to);
      default:
        return kind_.count;
    }
  }
  Array given(int from, int to) const {
    Array data(count(from, to), allocator_);
    for (size_t index = 0; index < data.size(); ++index)
      data[index] = number_ * 1'000'000 + from * 100'000 + to * 10'000 + static_cast<int64_t>(index % 9973);
    return data;
  }
  Array combined(int to) const {
    Array sums(count(0, to), allocator_);
    for (int from = 0; from < size_; ++from) {
      const Array data = given(from, to);
      for (size_t index = 0; index < sums.size(); ++index) sums[index] += data[index];
    }
    return sums;
  }

  void give() {
    const bool gives = kind_.op != OpKind::kScatter || is_root();
    if (has_input_blocks(kind_.op) && gives)
      for (int to = 0; to < size_; ++to) inputs_.push_back(given(rank_, to));
    if (kind_.op == OpKind::kScatter || kind_.op == OpKind::kReduceScatter)
      array_.resize(count(rank_, rank_));
    else if (kind_.op != OpKind::kAllToAll)
      array_ = given(rank_, 0);
    request_.inputs = blocks(inputs_);
  }
  void take() {
    const bool collects = kind_.op == OpKind::kAllGather || kind_.op == OpKind::kAllToAll;
    if (collects || (kind_.op == OpKind::kGather && is_root()))
      for (int from = 0; from < size_; ++from) outputs_.emplace_back(count(from, rank_), allocator_);
    request_.input = request_.output = array_.data();
    if (kind_.in_place && kind_.op == OpKind::kAllGather) {
      Array& own = outputs_[static_cast<size_t>(rank_)];
      own = given(rank_, 0);
      request_.input = own.data();
    }
    if (kind_.in_place && kind_.op == OpKind::kScatter && is_root()) {
      array_ = given(rank_, rank_);
      request_.output = inputs_[static_cast<size_t>(rank_)].data();
    }
    request_.outputs = blocks(outputs_);
  }
  // What becomes of the array that is not in blocks.
  Array expected() const {
    switch (kind_.op) {
      case OpKind::kBroadcast:
        return given(kind_.root, 0);
      case OpKind::kReduce:
        return is_root() ? combined(0) : given(rank_, 0);
      case OpKind::kAllReduce:
        return combined(0);
      case OpKind::kScatter:
        return given(kind_.root, rank_);
      case OpKind::kReduceScatter:
        return combined(rank_);
      case OpKind::kAllToAll:
        return Array(allocator_);
      default:
        return given(rank_, 0);
    }
  }
  static std::vector<Block> blocks(std::vector<Array>& arrays) {
    std::vector<Block> all;
    for (Array& array : arrays) all.push_back({array.data(), array.size()});
    return all;
  }

  const CallKind kind_;
  const int64_t number_;
  const int rank_;
  const int size_;
  const ArrayAllocator<int64_t> allocator_;
  Array array_;
  std::vector<Array> inputs_;
  std::vector<Array> outputs_;
  Request request_;
};

}  // namespace procgroup
