// Array arguments: any array -> (address, count, dtype), held for as long as it is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cuda/cuda_driver.hpp"
#include "dtype/dtype.hpp"
#include "dtype/strided.hpp"
#include "ops/request.hpp"

namespace procgroup {

enum class Access {
  kRead,
  kWrite,   // its elements are replaced
  kUpdate,  // its elements are read first
};

// torch's name for a parameter, or for one element of a list that is a parameter: "tensor", "tensor_list[3]".
struct ParameterName {
  const char* name;
  int index = -1;

  std::string text() const { return index < 0 ? name : name + ("[" + std::to_string(index) + "]"); }
};

// An array in memory. Buffers, torch's own tensors and arrays of CuPy and its like are read here. Everything else, and
// every invalid argument, goes through procgroup.arrays.view, which has the adapters of other libraries and the error
// texts. An array that is not contiguous, or that is retained, has its elements in scratch memory while it is in use:
// see move_through_scratch.
class ArrayView {
 public:
  ArrayView(nanobind::handle array, Access access, ParameterName name);
  ArrayView(ArrayView&& other) noexcept;
  ArrayView& operator=(ArrayView&&) = delete;
  ~ArrayView();  // with the interpreter's lock held

  void* data() const { return data_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * dtype_size(dtype_); }
  Dtype dtype() const { return dtype_; }
  // The length of the first dimension; 1 for an array without dimensions.
  size_t rows() const { return rows_; }
  Access access() const { return access_; }
  // Whether the elements are in the memory of a CUDA device, which this process cannot read; and of which one.
  bool is_on_device() const { return on_device_ != nullptr; }
  int device() const { return on_device_->number; }
  // The array itself, of an array on a device, and the stream on which it was used when it was read, if that is known:
  // null where the library states none.
  nanobind::handle array() const { return on_device_->array; }
  std::optional<CudaStream> stream() const { return on_device_->stream; }
  // Of one whose elements are not in C order: a hash of their order in memory, otherwise zero.
  uint64_t order() const { return on_device_->order; }
  // The array's own memory.
  Strided place() const;
  bool has_scratch() const { return scratch_ != nullptr; }
  // Keep the array's elements until the call has gone well: from now on data() is scratch memory. A call on a device
  // does not take that: see PythonGroup::issue.
  void retain();
  // Keep what the array's memory belongs to, beyond the array itself: it may get another memory while a call runs.
  void hold_memory();

 private:
  friend void move_through_scratch(Request& request, std::span<const ArrayView> views);

  struct Scratch {
    Strided place;
    std::unique_ptr<std::byte[]> memory;
  };

  struct OnDevice {
    int number;
    nanobind::object array;
    std::optional<CudaStream> stream;
    uint64_t order = 0;
  };

  bool from_buffer(nanobind::handle array, ParameterName name);
  bool from_torch(nanobind::handle array, ParameterName name);
  bool from_cuda_interface(nanobind::handle array);
  void from_python(nanobind::handle array, ParameterName name);
  void lie_at(Strided place, ParameterName name);

  Access access_;
  Dtype dtype_ = Dtype::kUint8;
  void* data_ = nullptr;
  size_t count_ = 0;
  size_t rows_ = 1;
  Py_buffer buffer_{};
  nanobind::object owner_;
  nanobind::object memory_;
  std::unique_ptr<OnDevice> on_device_;
  bool is_tensor_ = false;
  std::unique_ptr<Scratch> scratch_;  // keeps its address when the view moves
};

// Let the elements of strided and retained arrays be copied into their scratch memory right before the call reads them,
// and back when it went well. The views' scratch memory outlives the request.
void move_through_scratch(Request& request, std::span<const ArrayView> views);

Dtype dtype_from_name(const char* name);  // throws nanobind::type_error

}  // namespace procgroup
