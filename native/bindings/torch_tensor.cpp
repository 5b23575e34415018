#include "torch_tensor.hpp"

#include <cstdint>
#include <optional>
#include <utility>

namespace nb = nanobind;

namespace procgroup {
namespace {

// From the DLPack specification, version 1.2: DLTensor and DLPackExchangeAPI.
struct DlpackTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeFunctions {
  uint32_t major;
  uint32_t minor;
  ExchangeFunctions* older;
  void* unused[3];
  int (*read_tensor)(void* python_object, DlpackTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device, void** out);
};

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

struct Torch {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  ExchangeFunctions* functions = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_conj = nullptr;
  PyTypeObject* other = nullptr;  // the last class of arrays that came while torch was not imported
};

// Found once, when the first tensor comes; torch is never imported here. Guarded by the interpreter's lock.
constinit Torch torch;

bool find() {
  const nb::object module = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
  if (!module.is_valid()) return false;
  const nb::object tensor = nb::getattr(module, "Tensor", nb::none());
  const nb::object networks = nb::getattr(module, "nn", nb::none());
  const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return false;
  auto* functions = static_cast<ExchangeFunctions*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (functions != nullptr && functions->major > 1) functions = functions->older;
  if (functions == nullptr || functions->read_tensor == nullptr) return false;
  torch.functions = functions;
  torch.parameter = nb::getattr(networks, "Parameter", nb::none()).release().ptr();
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  torch.is_conj = PyUnicode_InternFromString("is_conj");
  torch.tensor = tensor.inc_ref().ptr();
  return true;
}

bool answers_yes(nb::handle tensor, PyObject* question) {
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), question, nullptr));
  if (!answer.is_valid()) throw nb::python_error();
  return answer.ptr() == Py_True;
}

std::optional<Dtype> dtype_of(const DlpackTensor& tensor) {
  if (tensor.lanes != 1) return std::nullopt;
  return find_dtype([&](const DtypeRow& row) { return row.dlpack == tensor.code && 8 * row.bytes == tensor.bits; });
}

// Whether it is a tensor, and a parameter counts as one.
bool is_tensor(nb::handle array) {
  // torch's classes are written in Python; arrays of NumPy are not of a heap type, and need not look for torch.
  if (!PyType_HasFeature(Py_TYPE(array.ptr()), Py_TPFLAGS_HEAPTYPE)) return false;
  if (torch.tensor == nullptr) {
    PyTypeObject* const given = Py_TYPE(array.ptr());
    if (given == torch.other) return false;
    if (!find()) {
      nb::handle(given).inc_ref();
      nb::handle(std::exchange(torch.other, given)).dec_ref();
      return false;
    }
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  return type == torch.tensor || type == torch.parameter;
}

}  // namespace

bool read_torch_stream(nb::handle array, int device, CudaStream& stream) {
  if (!is_tensor(array) || torch.functions->current_stream == nullptr) return false;
  if (torch.functions->current_stream(kCuda, device, &stream) != 0) {
    PyErr_Clear();
    return false;
  }
  if (stream == nullptr) stream = legacy_stream();
  return true;
}

bool read_torch_tensor(nb::handle array, Strided& place, Dtype& dtype, int& device) {
  if (!is_tensor(array)) return false;
  DlpackTensor tensor{};
  if (torch.functions->read_tensor(array.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool is_complex = tensor.code == 5;
  const std::optional<Dtype> found = dtype_of(tensor);
  if ((tensor.device_type != kCpu && tensor.device_type != kCuda) || !found) return false;
  dtype = *found;
  device = tensor.device_type == kCuda ? tensor.device_id : kHostMemory;
  if (answers_yes(array, torch.is_neg) || (is_complex && answers_yes(array, torch.is_conj))) return false;
  place.base = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  place.element_bytes = dtype_size(dtype);
  for (int32_t index = 0; index < tensor.dimensions; ++index) {
    place.shape.push_back(static_cast<ptrdiff_t>(tensor.shape[index]));
    place.strides.push_back(static_cast<ptrdiff_t>(tensor.strides[index]) *
                            static_cast<ptrdiff_t>(place.element_bytes));
  }
  return true;
}

}  // namespace procgroup
