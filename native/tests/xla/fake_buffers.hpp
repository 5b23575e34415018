// Buffers as XLA gives them, and the elements of the tests' calls.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "xla/compiled_call.hpp"

namespace procgroup {

// The arguments or the results of a call: a token, and arrays.
class FakeBuffers {
 public:
  FakeBuffers() { add(xla::kToken, nullptr, {}); }
  template <class Element>
  void add(xla::DataType dtype, std::vector<Element>& elements, std::vector<int64_t> dimensions) {
    add(dtype, elements.data(), std::move(dimensions));
  }
  void add(xla::DataType dtype, void* data, std::vector<int64_t> dimensions) {
    dimensions_.push_back(std::make_unique<std::vector<int64_t>>(std::move(dimensions)));
    std::vector<int64_t>& shape = *dimensions_.back();
    buffers_.push_back(std::make_unique<xla::Buffer>(
        xla::Buffer{sizeof(xla::Buffer), nullptr, dtype, data, static_cast<int64_t>(shape.size()), shape.data()}));
    pointers_.push_back(buffers_.back().get());
    types_.push_back(xla::kBufferType);
  }
  xla::Buffers all() {
    return {sizeof(xla::Buffers), nullptr, static_cast<int64_t>(types_.size()), types_.data(), pointers_.data()};
  }
  std::vector<FlatArray> arrays() { return arrays_of(all()); }

 private:
  std::vector<std::unique_ptr<std::vector<int64_t>>> dimensions_;
  std::vector<std::unique_ptr<xla::Buffer>> buffers_;
  std::vector<xla::Buffer*> pointers_;
  std::vector<int> types_;
};

inline constexpr int kRoot = 1;

// Another one for each rank and place.
template <class Element>
Element element(int rank, size_t index) {
  return 1000 * (rank + 1) + static_cast<Element>(index);
}

template <class Element>
std::vector<Element> elements(int rank, size_t count) {
  std::vector<Element> found(count);
  for (size_t index = 0; index < count; ++index) found[index] = element<Element>(rank, index);
  return found;
}

// What `rank` gets of arrays that have `count` elements in each row.
template <class Element>
std::vector<Element> expected(OpKind op, int rank, int size, size_t count, ReduceOp reduce_op = ReduceOp::kSum) {
  const auto reduced_at = [&](size_t at) {
    Element all = 0;
    for (int other = 0; other < size; ++other)
      all = reduce_op == ReduceOp::kBor ? all | element<Element>(other, at) : all + element<Element>(other, at);
    return all;
  };
  std::vector<Element> found(count * (has_output_blocks(op) ? static_cast<size_t>(size) : 1));
  for (size_t index = 0; index < found.size(); ++index) {
    const int row = static_cast<int>(index / count);
    const size_t within = index % count;
    switch (op) {
      case OpKind::kAllReduce:
        found[index] = reduced_at(index);
        break;
      case OpKind::kReduce:
        found[index] = rank == kRoot ? reduced_at(index) : 0;
        break;
      case OpKind::kBroadcast:
        found[index] = element<Element>(kRoot, index);
        break;
      case OpKind::kAllGather:
        found[index] = element<Element>(row, within);
        break;
      case OpKind::kReduceScatter:
        found[index] = reduced_at(static_cast<size_t>(rank) * count + index);
        break;
      case OpKind::kAllToAll:
        found[index] = element<Element>(row, static_cast<size_t>(rank) * count + within);
        break;
      default:  // kSend: to the next rank
        found[index] = element<Element>((rank + size - 1) % size, index);
    }
  }
  return found;
}

}  // namespace procgroup
