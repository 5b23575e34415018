// Arithmetic on plain buffers: the element kernels, so that the tests can compare them with NumPy, and permutations.
#include "dtype/kernels.hpp"

#include <Python.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "dtype/dtype.hpp"
#include "python_host.hpp"

namespace nb = nanobind;
using namespace procgroup;

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

Dtype known_dtype(const std::string& name) {
  if (const std::optional<Dtype> dtype = dtype_named(name)) return *dtype;
  throw std::invalid_argument("expected the name of a dtype that can be reduced, got " + name);
}

ReduceOp reduce_op_numbered(int number) {
  if (number >= 0 && number < kReduceOps) return static_cast<ReduceOp>(number);
  throw std::invalid_argument("expected a ReduceOp, got " + std::to_string(number));
}

void reduce_elements(const std::string& name, int op, nb::handle out, const std::vector<nb::object>& sources) {
  const Dtype dtype = known_dtype(name);
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
  reduce(dtype, reduce_op_numbered(op), target.data(), addresses.data(), static_cast<int>(addresses.size()),
         target.bytes() / dtype_size(dtype));
}

nb::list reduce_ops() {
  nb::list rows;
  for (const ReduceOpRow& row : kReduceOpTable) {
    nb::dict entry;
    entry["name"] = row.name;
    entry["combines"] = reduce_op_name(row.combines);
    entry["mpi"] = row.mpi;
    rows.append(entry);
  }
  return rows;
}

// Random permutations in PyTorch's order, so that a sampler visits the same indices with PyTorch and without it.
//
// From this length on, 32 random bits would favour some indices, and torch.randperm draws 64.
constexpr Py_ssize_t kWideFrom = std::numeric_limits<uint32_t>::max() / 20;

// The first draw is the upper half.
uint64_t draw_wide(std::mt19937& random) {
  const uint64_t upper = random();
  return upper << 32 | random();
}

// Fisher-Yates from the front. std::mt19937 is seeded as PyTorch's CPU generator is.
void permute(int64_t* indices, Py_ssize_t count, std::mt19937& random) {
  std::iota(indices, indices + count, int64_t{0});
  for (Py_ssize_t i = 0; i + 1 < count; ++i) {
    std::swap(indices[i], indices[i + static_cast<Py_ssize_t>(random() % static_cast<uint64_t>(count - i))]);
  }
}

// The variant that fills the array while it goes: each index is swapped into what is there already.
void permute_wide(int64_t* indices, Py_ssize_t count, std::mt19937& random) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto other = static_cast<Py_ssize_t>(draw_wide(random) % static_cast<uint64_t>(i + 1));
    indices[i] = i;
    std::swap(indices[i], indices[other]);
  }
}

void random_permutation(nb::handle output, uint32_t seed) {
  const BufferView buffer(output, PyBUF_WRITABLE);
  const Unlocked others_run;
  const auto count = static_cast<Py_ssize_t>(buffer.bytes() / sizeof(int64_t));
  std::mt19937 random(seed);
  (count < kWideFrom ? permute : permute_wide)(static_cast<int64_t*>(buffer.data()), count, random);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("reduce_ops", &reduce_ops, nb::sig("def reduce_ops() -> list[dict[str, str]]"));
  module.def("reduce_elements", &reduce_elements, nb::arg("dtype_name"), nb::arg("op"), nb::arg("out"),
             nb::arg("sources"));
  module.def(
      "supports", [](int op, const std::string& dtype) { return supports(reduce_op_numbered(op), known_dtype(dtype)); },
      nb::arg("op"), nb::arg("dtype_name"));
  module.def("random_permutation", &random_permutation, nb::arg("output"), nb::arg("seed"));
  module.def("instruction_set", &instruction_set);
  module.def("instruction_sets", &instruction_sets);
  module.def("set_instruction_set", &set_instruction_set, nb::arg("name"));
}
