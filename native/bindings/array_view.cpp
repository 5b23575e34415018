#include "array_view.hpp"

#include <cstring>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace procgroup {
namespace {

// The dtype of a buffer's format string; false for what is not one native number per element.
bool parse_format(const char* format, Py_ssize_t bytes, Dtype& dtype) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == '\0' || format[1] != '\0') return false;
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
  for (int code = 0; code < kDtypes; ++code)
    if (std::strcmp(dtype_name(static_cast<Dtype>(code)), name) == 0) return static_cast<Dtype>(code);
  throw nb::type_error(("unknown dtype " + std::string(name)).c_str());
}

ArrayView::ArrayView(nb::handle array, Access access) {
  if (!from_buffer(array, access)) from_python(array, access);
}

ArrayView::ArrayView(ArrayView&& other) noexcept
    : data_(other.data_),
      count_(other.count_),
      dtype_(other.dtype_),
      buffer_(std::exchange(other.buffer_, {})),
      owner_(std::move(other.owner_)) {}

ArrayView::~ArrayView() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool ArrayView::from_buffer(nb::handle array, Access access) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (access == Access::kWrite ? PyBUF_WRITABLE : 0);
  // bytes and its like are buffers, but nobody means them as arrays of numbers.
  if (PyBytes_Check(array.ptr()) || PyByteArray_Check(array.ptr())) return false;
  if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) {
    PyErr_Clear();
    buffer_.obj = nullptr;
    return false;
  }
  if (!parse_format(buffer_.format, buffer_.itemsize, dtype_)) {
    PyBuffer_Release(&buffer_);
    return false;
  }
  data_ = buffer_.buf;
  count_ = static_cast<size_t>(buffer_.len) / static_cast<size_t>(buffer_.itemsize);
  return true;
}

void ArrayView::from_python(nb::handle array, Access access) {
  owner_ = nb::module_::import_("procgroup.arrays.view").attr("view")(array, access == Access::kWrite);
  data_ = reinterpret_cast<void*>(nb::cast<uintptr_t>(owner_.attr("address")));
  count_ = nb::cast<size_t>(owner_.attr("count"));
  dtype_ = dtype_from_name(nb::cast<const char*>(owner_.attr("dtype")));
}

}  // namespace procgroup
