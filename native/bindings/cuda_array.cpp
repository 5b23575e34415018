#include "cuda_array.hpp"

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/gpu.hpp"

namespace nb = nanobind;

namespace procgroup {
namespace {

// Whether an array is of this class of a library that is imported.
bool is_of(nb::handle array, const char* library, const char* name) {
  const nb::object module = nb::steal(PyImport_GetModule(nb::str(library).ptr()));
  const nb::object type = module.is_valid() ? nb::getattr(module, name, nb::none()) : nb::none();
  return !type.is_none() && PyObject_IsInstance(array.ptr(), type.ptr()) == 1;
}

// Not for arrays of JAX, which are immutable, and tensors of torch, whose interface states no stream. The answer for
// the last class is kept, because a program has few. Guarded by the interpreter's lock.
bool is_read_here(nb::handle array) {
  static PyTypeObject* last = nullptr;
  static bool is_read = false;
  PyTypeObject* const type = Py_TYPE(array.ptr());
  if (type != last) {
    is_read = PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) && !is_of(array, "jax", "Array") &&
              !is_of(array, "torch", "Tensor");
    nb::handle(type).inc_ref();
    nb::handle(std::exchange(last, type)).dec_ref();
  }
  return is_read;
}

nb::object interface_of(nb::handle array) {
  if (!is_read_here(array)) return {};
  static PyObject* const name = PyUnicode_InternFromString("__cuda_array_interface__");
  nb::object interface = nb::steal(PyObject_GetAttr(array.ptr(), name));
  if (!interface.is_valid()) PyErr_Clear();
  return interface.is_valid() && PyDict_Check(interface.ptr()) ? interface : nb::object();
}

struct Keys {
  PyObject* const mask = PyUnicode_InternFromString("mask");
  PyObject* const strides = PyUnicode_InternFromString("strides");
  PyObject* const data = PyUnicode_InternFromString("data");
  PyObject* const shape = PyUnicode_InternFromString("shape");
  PyObject* const type = PyUnicode_InternFromString("typestr");
  PyObject* const stream = PyUnicode_InternFromString("stream");
};
const Keys& keys() {
  static const Keys interned;
  return interned;
}

nb::handle entry(nb::handle interface, PyObject* key) {
  PyObject* const found = PyDict_GetItemWithError(interface.ptr(), key);
  return found == nullptr ? nb::handle(Py_None) : nb::handle(found);
}

// Of a type's text, as "<f4", which has no name for bfloat16 and float8.
std::optional<Dtype> dtype_of(nb::handle given) {
  constexpr std::array<char, 7> kLetters = {'i', 'u', 'f', '\0', '\0', 'c', 'b'};  // by DLPack's code
  Py_ssize_t length = 0;
  const char* const text = PyUnicode_Check(given.ptr()) ? PyUnicode_AsUTF8AndSize(given.ptr(), &length) : nullptr;
  if (text == nullptr) PyErr_Clear();
  if (length < 3 || (text[0] != '<' && text[0] != '|') || text[1] == '\0') return std::nullopt;
  return find_dtype([&](const DtypeRow& row) {
    return row.dlpack < kLetters.size() && kLetters[row.dlpack] == text[1] && std::to_string(row.bytes) == text + 2;
  });
}

bool read_stream(nb::handle interface, CudaStream& stream) {
  const nb::handle given = entry(interface, keys().stream);
  stream = given.is_none() ? nullptr : PyLong_AsVoidPtr(given.ptr());
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

}  // namespace

bool read_cuda_array(nb::handle array, bool is_written, CudaArray& read) {
  const nb::object interface = interface_of(array);
  if (!interface.is_valid() || !entry(interface, keys().mask).is_none() || !entry(interface, keys().strides).is_none())
    return false;
  const nb::handle data = entry(interface, keys().data);
  const nb::handle shape = entry(interface, keys().shape);
  if (!PyTuple_Check(data.ptr()) || PyTuple_Size(data.ptr()) != 2 || !PyTuple_Check(shape.ptr())) return false;
  if (is_written && PyTuple_GetItem(data.ptr(), 1) != Py_False) return false;
  const std::optional<Dtype> dtype = dtype_of(entry(interface, keys().type));
  if (!dtype) return false;
  read.dtype = *dtype;
  read.count = 1;
  const Py_ssize_t dimensions = PyTuple_Size(shape.ptr());
  for (Py_ssize_t index = 0; index < dimensions; ++index) {
    const size_t length = PyLong_AsSize_t(PyTuple_GetItem(shape.ptr(), index));
    if (index == 0) read.rows = length;
    read.count *= length;
  }
  if (PyErr_Occurred() == nullptr) read.address = PyLong_AsSize_t(PyTuple_GetItem(data.ptr(), 0));
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  if (read.count == 0 || read.address == 0 || !read_stream(interface, read.stream)) return false;
  try {
    read.device = gpu_of(read.address);
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

bool read_cuda_stream(nb::handle array, CudaStream& stream) {
  const nb::object interface = interface_of(array);
  return interface.is_valid() && read_stream(interface, stream);
}

}  // namespace procgroup
