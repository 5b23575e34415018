// Python buffers that together are one array of bytes to be read, held for as long as it is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "engine/parts.hpp"

namespace procgroup {

class InputParts {
 public:
  // `buffers[i]` lies at `offsets[i]` of an array of `bytes` bytes. Throws nb::value_error for parts that are not in
  // order or do not fit, and what asking an object for its buffer raises.
  InputParts(nanobind::handle buffers, nanobind::handle offsets, size_t bytes);
  InputParts(const InputParts&) = delete;
  InputParts& operator=(const InputParts&) = delete;
  ~InputParts();  // with the interpreter's lock held

  const std::vector<Part>& parts() const { return parts_; }
  // The whole array, with zeros where it has no value.
  std::unique_ptr<std::byte[]> pack() const;

 private:
  void add(nanobind::handle buffer, size_t offset);

  size_t bytes_;
  std::vector<Py_buffer> views_;
  std::vector<Part> parts_;
};

}  // namespace procgroup
