// Finds the line of the program that makes a call: the innermost frame that is not procgroup's own, nor PyTorch's.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "interpreter_stack.hpp"
#include "runtime/flight_record.hpp"

namespace procgroup {

namespace nb = nanobind;

class FrameObject;

// The numbered source lines of one flight record. With the interpreter's lock. A line is found once for each place of
// the program that makes calls, and known from then on by its code object, which is kept, and its instruction.
class SourceLines {
 public:
  explicit SourceLines(FlightRecord& record);

  // The number of the calling line in the record; 0 where no Python code of the program is on the stack, or where the
  // record has no room for more lines.
  uint32_t here();

 private:
  struct Code {
    PyObject* object = nullptr;
    bool is_library = false;
  };
  struct Place {
    PyObject* code = nullptr;
    uintptr_t instruction = 0;  // its address, or, where the interpreter's stack is not usable, its offset
    uint32_t number = 0;
  };
  static constexpr size_t kPlaces = 256;
  static constexpr size_t kMostCodes = 4096;

  static size_t slot(PyObject* code, uintptr_t instruction) {
    return (reinterpret_cast<uintptr_t>(code) / 16 + instruction / 2) % kPlaces;
  }
  // The same by CPython's public functions; `caller` is the frame that is found then, as far as it is known.
  uint32_t find(InterpreterStack::Frame caller);
  bool is_library(nb::handle code);
  uint32_t number_of(const FrameObject& frame, InterpreterStack::Frame caller);

  FlightRecord& record_;
  const std::string own_directory_;
  InterpreterStack stack_;
  std::array<Place, kPlaces> places_{};             // where a place is found depends on its address
  std::array<Code, kPlaces> codes_{};               // the same for code objects
  std::unordered_map<PyObject*, nb::object> kept_;  // all code objects of both
  std::unordered_map<std::string, uint32_t> numbers_;
};

}  // namespace procgroup
