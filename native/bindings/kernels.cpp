// The element kernels on plain buffers, so that the tests can compare them with NumPy.
#include <Python.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "dtype/dtype.hpp"
#include "dtype/instruction_set.hpp"

namespace nb = nanobind;

namespace {

// One exported buffer; released when this object ends.
class BufferView {
 public:
  BufferView(nb::handle exporter, int flags) {
    if (PyObject_GetBuffer(exporter.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }

  void* data() const { return view_.buf; }
  size_t bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

procgroup::Dtype dtype_named(const std::string& name) {
  for (int number = 0; number < procgroup::kDtypes; ++number) {
    const auto dtype = static_cast<procgroup::Dtype>(number);
    if (name == procgroup::dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument("expected the name of a dtype that can be reduced, got " + name);
}

procgroup::ReduceOp reduce_op_numbered(int number) {
  if (number >= 0 && number < procgroup::kReduceOps) return static_cast<procgroup::ReduceOp>(number);
  throw std::invalid_argument("expected a ReduceOp, got " + std::to_string(number));
}

void reduce_elements(const std::string& name, int op, nb::handle out, const std::vector<nb::object>& sources) {
  const procgroup::Dtype dtype = dtype_named(name);
  const BufferView target(out, PyBUF_WRITABLE);
  std::vector<std::unique_ptr<BufferView>> views;
  std::vector<const void*> addresses;
  for (const nb::object& source : sources) {
    views.push_back(std::make_unique<BufferView>(source, PyBUF_SIMPLE));
    addresses.push_back(views.back()->data());
    if (views.back()->bytes() != target.bytes()) {
      throw std::invalid_argument("expected sources of " + std::to_string(target.bytes()) + " bytes, as out has, got " +
                                  std::to_string(views.back()->bytes()));
    }
  }
  procgroup::reduce(dtype, reduce_op_numbered(op), target.data(), addresses.data(), static_cast<int>(addresses.size()),
                    target.bytes() / procgroup::dtype_size(dtype));
}

nb::list reduce_ops() {
  nb::list rows;
  for (const procgroup::ReduceOpRow& row : procgroup::kReduceOpTable) {
    nb::dict entry;
    entry["name"] = row.name;
    entry["combines"] = procgroup::reduce_op_name(row.combines);
    entry["mpi"] = row.mpi;
    rows.append(entry);
  }
  return rows;
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("reduce_ops", &reduce_ops, nb::sig("def reduce_ops() -> list[dict[str, str]]"));
  module.def("reduce_elements", &reduce_elements, nb::arg("dtype_name"), nb::arg("op"), nb::arg("out"),
             nb::arg("sources"));
  module.def(
      "supports",
      [](int op, const std::string& dtype) { return procgroup::supports(reduce_op_numbered(op), dtype_named(dtype)); },
      nb::arg("op"), nb::arg("dtype_name"));
  module.def("instruction_set", &procgroup::instruction_set);
  module.def("instruction_sets", &procgroup::instruction_sets);
  module.def("set_instruction_set", &procgroup::set_instruction_set, nb::arg("name"));
}
