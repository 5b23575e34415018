#include "array_view.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda_array.hpp"
#include "exceptions.hpp"
#include "torch_tensor.hpp"

namespace nb = nanobind;

namespace procgroup {
namespace {

// The dtype of a buffer's format string; false for what is not one native number per element.
bool parse_format(const char* format, Py_ssize_t bytes, Dtype& dtype) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool is_complex = format[0] == 'Z' && (format[1] == 'f' || format[1] == 'd');
  if (format[0] == '\0' || format[is_complex ? 2 : 1] != '\0') return false;
  const auto sized = [&](Dtype one, Dtype two, Dtype four, Dtype eight) {
    dtype = bytes == 1 ? one : bytes == 2 ? two : bytes == 4 ? four : eight;
    return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
  };
  switch (*format) {
    case '?':
      dtype = Dtype::kBool;
      return bytes == 1;
    case 'e':
      dtype = Dtype::kFloat16;
      return bytes == 2;
    case 'f':
      dtype = Dtype::kFloat32;
      return bytes == 4;
    case 'd':
      dtype = Dtype::kFloat64;
      return bytes == 8;
    case 'Z':
      dtype = bytes == 8 ? Dtype::kComplex64 : Dtype::kComplex128;
      return bytes == 8 || bytes == 16;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return sized(Dtype::kInt8, Dtype::kInt16, Dtype::kInt32, Dtype::kInt64);
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      return sized(Dtype::kUint8, Dtype::kUint16, Dtype::kUint32, Dtype::kUint64);
    default:
      return false;
  }
}

}  // namespace

Dtype dtype_from_name(const char* name) {
  if (const std::optional<Dtype> dtype = dtype_named(name)) return *dtype;
  throw nb::type_error(("unknown dtype " + std::string(name)).c_str());
}

ArrayView::ArrayView(nb::handle array, Access access, ParameterName name) : access_(access) {
  if (!from_torch(array, name) && !from_buffer(array, name) && !from_cuda_interface(array)) from_python(array, name);
}

ArrayView::ArrayView(ArrayView&& other) noexcept
    : access_(other.access_),
      dtype_(other.dtype_),
      data_(other.data_),
      count_(other.count_),
      rows_(other.rows_),
      buffer_(std::exchange(other.buffer_, {})),
      owner_(std::move(other.owner_)),
      memory_(std::move(other.memory_)),
      on_device_(std::move(other.on_device_)),
      is_tensor_(other.is_tensor_),
      scratch_(std::move(other.scratch_)) {}

ArrayView::~ArrayView() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool ArrayView::from_torch(nb::handle array, ParameterName name) {
  Strided place;
  int device = kHostMemory;
  if (!read_torch_tensor(array, place, dtype_, device)) return false;
  owner_ = nb::borrow(array);
  is_tensor_ = true;
  if (device != kHostMemory) {
    on_device_ = std::make_unique<OnDevice>(device, owner_);
    if (CudaStream stream = nullptr; read_torch_stream(array, device, stream)) on_device_->stream = stream;
  }
  lie_at(std::move(place), name);
  return true;
}

bool ArrayView::from_cuda_interface(nb::handle array) {
  CudaArray read;
  if (!read_cuda_array(array, access_ != Access::kRead, read)) return false;
  owner_ = nb::borrow(array);
  on_device_ = std::make_unique<OnDevice>(read.device, owner_, read.stream);
  dtype_ = read.dtype;
  data_ = reinterpret_cast<void*>(read.address);
  count_ = read.count;
  rows_ = read.rows;
  return true;
}

bool ArrayView::from_buffer(nb::handle array, ParameterName name) {
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (access_ == Access::kRead ? 0 : PyBUF_WRITABLE);
  // bytes and its like are buffers, but nobody means them as arrays of numbers.
  if (PyObject_CheckBuffer(array.ptr()) == 0 || PyBytes_Check(array.ptr()) || PyByteArray_Check(array.ptr()))
    return false;
  // The buffer of a masked array shows its elements and hides its mask. NumPy's own arrays are of no heap type.
  if (PyType_HasFeature(Py_TYPE(array.ptr()), Py_TPFLAGS_HEAPTYPE) && PyObject_HasAttrString(array.ptr(), "mask") != 0)
    return false;
  if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) {
    PyErr_Clear();
    buffer_.obj = nullptr;
    return false;
  }
  if (!parse_format(buffer_.format, buffer_.itemsize, dtype_)) {
    PyBuffer_Release(&buffer_);
    return false;
  }
  if (!PyBuffer_IsContiguous(&buffer_, 'C')) {
    lie_at({.base = static_cast<std::byte*>(buffer_.buf),
            .element_bytes = static_cast<size_t>(buffer_.itemsize),
            .shape = {buffer_.shape, buffer_.shape + buffer_.ndim},
            .strides = {buffer_.strides, buffer_.strides + buffer_.ndim}},
           name);
    return true;
  }
  data_ = buffer_.buf;
  count_ = static_cast<size_t>(buffer_.len) / static_cast<size_t>(buffer_.itemsize);
  if (buffer_.ndim > 0) rows_ = static_cast<size_t>(buffer_.shape[0]);
  return true;
}

void ArrayView::from_python(nb::handle array, ParameterName name) {
  owner_ =
      nb::module_::import_("procgroup.arrays.view").attr("view")(array, access_ != Access::kRead, name.text(), true);
  if (const int device = nb::cast<int>(owner_.attr("device")); device != kHostMemory)
    on_device_ = std::make_unique<OnDevice>(device, nb::borrow(array));
  dtype_ = dtype_from_name(nb::cast<const char*>(owner_.attr("dtype")));
  lie_at({.base = reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(owner_.attr("address"))),
          .element_bytes = dtype_size(dtype_),
          .shape = nb::cast<std::vector<ptrdiff_t>>(owner_.attr("shape")),
          .strides = nb::cast<std::vector<ptrdiff_t>>(owner_.attr("strides"))},
         name);
}

void ArrayView::lie_at(Strided place, ParameterName name) {
  data_ = place.base;
  count_ = place.count();
  if (!place.shape.empty()) rows_ = static_cast<size_t>(place.shape[0]);
  if (place.is_contiguous()) return;
  if (is_on_device()) {
    if (!place.fills_a_block())
      raise(nb::module_::import_("procgroup.errors")
                .attr("ArgumentError")("`" + name.text() + "` is not contiguous, and arrays on a GPU are moved as a " +
                                       "whole. Pass a contiguous copy of it, and copy the result back."));
    on_device_->order = place.order();
    return;
  }
  if (access_ != Access::kRead && place.overlaps_itself())
    raise(nb::module_::import_("procgroup.errors")
              .attr("ArgumentError")("`" + name.text() +
                                     "` has several elements in one place, as broadcast views have, and this call "
                                     "writes into it. Pass a copy of it."));
  std::unique_ptr<std::byte[]> memory(new std::byte[bytes()]);
  data_ = memory.get();
  scratch_ = std::make_unique<Scratch>(std::move(place), std::move(memory));
}

void ArrayView::retain() {
  if (access_ == Access::kRead || has_scratch() || is_on_device()) return;
  Strided own = place();
  std::unique_ptr<std::byte[]> memory(new std::byte[bytes()]);
  data_ = memory.get();
  scratch_ = std::make_unique<Scratch>(std::move(own), std::move(memory));
}

Strided ArrayView::place() const {
  if (scratch_) return scratch_->place;
  return {.base = static_cast<std::byte*>(data_), .element_bytes = bytes(), .shape = {}, .strides = {}};
}

void ArrayView::hold_memory() {
  if (is_tensor_) memory_ = owner_.attr("untyped_storage")();
}

void move_through_scratch(Request& request, std::span<const ArrayView> views) {
  std::vector<const ArrayView::Scratch*> read;
  std::vector<const ArrayView::Scratch*> written;
  for (const ArrayView& view : views) {
    if (view.scratch_ == nullptr) continue;
    if (view.access_ != Access::kWrite) read.push_back(view.scratch_.get());
    if (view.access_ != Access::kRead) written.push_back(view.scratch_.get());
  }
  if (!read.empty())
    request.before = [read = std::move(read), before = std::move(request.before)] {
      for (const ArrayView::Scratch* scratch : read) scratch->place.pack(scratch->memory.get());
      if (before) before();
    };
  if (!written.empty())
    request.after = [written = std::move(written), after = std::move(request.after)] {
      if (after) after();
      for (const ArrayView::Scratch* scratch : written) scratch->place.unpack(scratch->memory.get());
    };
}

}  // namespace procgroup
