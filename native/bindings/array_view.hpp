// The door for arrays: any buffer -> (address, count, dtype), held for as long as it is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "dtype/dtype.hpp"

namespace procgroup {

enum class Access { kRead, kWrite };

// Plain buffers are read here. What the buffer protocol cannot describe (bfloat16, other libraries) and
// what is refused (strided, read-only, foreign dtypes) goes through procgroup.arrays.view, which knows the words.
class ArrayView {
 public:
  ArrayView(nanobind::handle array, Access access);
  ArrayView(ArrayView&& other) noexcept;
  ArrayView& operator=(ArrayView&&) = delete;
  ~ArrayView();  // with the interpreter's lock held

  void* data() const { return data_; }
  size_t count() const { return count_; }
  Dtype dtype() const { return dtype_; }

 private:
  bool from_buffer(nanobind::handle array, Access access);
  void from_python(nanobind::handle array, Access access);

  void* data_ = nullptr;
  size_t count_ = 0;
  Dtype dtype_ = Dtype::kUint8;
  Py_buffer buffer_{};
  nanobind::object owner_;
};

Dtype dtype_from_name(const char* name);  // throws nanobind::type_error

}  // namespace procgroup
