#include "source_lines.hpp"

#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include <string_view>

namespace procgroup {
namespace {

// Public functions of CPython that its limited API lacks: looked up in the interpreter, which has them from 3.11 on.
using GetBack = PyFrameObject* (*)(PyFrameObject*);
using GetInstruction = int (*)(PyFrameObject*);

const GetBack get_back = reinterpret_cast<GetBack>(dlsym(RTLD_DEFAULT, "PyFrame_GetBack"));
const GetInstruction get_instruction = reinterpret_cast<GetInstruction>(dlsym(RTLD_DEFAULT, "PyFrame_GetLasti"));

// Deeper than any path from a program's line to its call.
constexpr int kMostFrames = 32;

PyObject* as_object(PyFrameObject* frame) { return reinterpret_cast<PyObject*>(frame); }

std::string file_of(PyObject* code) { return nb::cast<std::string>(nb::handle(code).attr("co_filename")); }

// With the separator at the end.
const std::string& own_directory() {
  static const std::string directory = [] {
    const std::string file = nb::cast<std::string>(nb::module_::import_("procgroup").attr("__file__"));
    return file.substr(0, file.rfind('/') + 1);
  }();
  return directory;
}

}  // namespace

size_t SourceLines::slot(PyObject* code, int instruction) {
  return (reinterpret_cast<uintptr_t>(code) / 16 + static_cast<uintptr_t>(instruction)) % kPlaces;
}

uint32_t SourceLines::here() {
  if (get_back == nullptr || get_instruction == nullptr) return 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(as_object(frame));
  uint32_t number = 0;
  for (int depth = 0; frame != nullptr && depth < kMostFrames; ++depth) {
    PyObject* const code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    const bool is_own = is_library(code);
    if (!is_own) number = number_of(frame, code);
    PyFrameObject* const caller = is_own ? get_back(frame) : nullptr;
    Py_DECREF(code);
    Py_DECREF(as_object(frame));
    frame = caller;
  }
  Py_XDECREF(as_object(frame));
  return number;
}

bool SourceLines::is_library(PyObject* code) {
  Place& place = codes_[slot(code, 0)];
  if (place.code == code) return place.number != 0;
  const std::string file = file_of(code);
  const bool is_library = file.starts_with(own_directory()) || file.find("/torch/") != std::string::npos;
  if (kept_.size() < kMostCodes) {
    kept_.try_emplace(code, nb::borrow(code));
    place = {code, 0, is_library ? 1u : 0u};
  }
  return is_library;
}

uint32_t SourceLines::number_of(PyFrameObject* frame, PyObject* code) {
  const int instruction = get_instruction(frame);
  Place& place = places_[slot(code, instruction)];
  if (place.code == code && place.instruction == instruction) return place.number;
  const std::string line = file_of(code) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  const auto [known, is_new] = numbers_.try_emplace(line, 0);
  if (is_new) known->second = record_.add_source_line(line);
  if (kept_.contains(code)) place = {code, instruction, known->second};
  return known->second;
}

}  // namespace procgroup
