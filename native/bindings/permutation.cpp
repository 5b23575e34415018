// Random permutations in PyTorch's order, so that a sampler visits the same indices with PyTorch and without it.
#include <Python.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "bindings.hpp"
#include "python_host.hpp"

namespace nb = nanobind;

namespace {

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
  Py_buffer buffer{};
  if (PyObject_GetBuffer(output.ptr(), &buffer, PyBUF_WRITABLE) != 0) throw nb::python_error();
  {
    const procgroup::Unlocked others_run;
    const Py_ssize_t count = buffer.len / static_cast<Py_ssize_t>(sizeof(int64_t));
    std::mt19937 random(seed);
    (count < kWideFrom ? permute : permute_wide)(static_cast<int64_t*>(buffer.buf), count, random);
  }
  PyBuffer_Release(&buffer);
}

}  // namespace

void bind_permutation(nb::module_& module) {
  module.def("random_permutation", &random_permutation, nb::arg("output"), nb::arg("seed"));
}
