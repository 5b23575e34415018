// Buffers as XLA gives them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "xla/compiled_call.hpp"

namespace procgroup {

// The arguments or the results of a call: a token, and arrays.
class FakeBuffers {
 public:
  FakeBuffers() { add(xla::DataType::kToken, nullptr, {}); }
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
  std::vector<XlaArray> arrays() { return arrays_of(all()); }

 private:
  std::vector<std::unique_ptr<std::vector<int64_t>>> dimensions_;
  std::vector<std::unique_ptr<xla::Buffer>> buffers_;
  std::vector<xla::Buffer*> pointers_;
  std::vector<int> types_;
};

}  // namespace procgroup
