// Python buffers that together are one array of bytes to be read, held for as long as it is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "base/iovec.hpp"

namespace procgroup {

class InputIovecs {
 public:
  // `buffers[i]` is at `offsets[i]` of an array of `bytes` bytes. Throws nb::value_error for iovecs that are not in
  // order or do not fit, and the error of an object without a buffer.
  InputIovecs(nanobind::handle buffers, nanobind::handle offsets, size_t bytes);
  InputIovecs(const InputIovecs&) = delete;
  InputIovecs& operator=(const InputIovecs&) = delete;
  ~InputIovecs();  // with the interpreter's lock held

  const std::vector<Iovec>& iovecs() const { return iovecs_; }
  // The whole array, with zeros where it has no value.
  std::unique_ptr<std::byte[]> pack() const;

 private:
  void add(nanobind::handle buffer, size_t offset);

  size_t bytes_;
  std::vector<Py_buffer> views_;
  std::vector<Iovec> iovecs_;
};

}  // namespace procgroup
