// Finds the line of the program that makes a call: the innermost frame that is not of procgroup, PyTorch or JAX.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "interpreter_stack.hpp"
#include "runtime/flight_record.hpp"

namespace procgroup {

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
  struct alignas(32) CallingLine {
    InterpreterStack::Frame frame;  // its instruction is an offset where the interpreter's stack is not usable
    PyObject* called = nullptr;     // the code of the library's function that it calls
    uint32_t number = 0;

    bool is_of(const InterpreterStack::Frame& other) const {
      return frame.code == other.code && frame.instruction == other.instruction && frame.code != nullptr;
    }
  };
  static constexpr size_t kLines = 256;
  static constexpr size_t kMostCodes = 4096;

  // Where a line or a code object is found depends on its address.
  CallingLine& line_of(const InterpreterStack::Frame& frame) {
    return lines_[(reinterpret_cast<uintptr_t>(frame.code) / 16 + frame.instruction / 2) % kLines];
  }
  Code& code_of(PyObject* code) { return codes_[reinterpret_cast<uintptr_t>(code) / 16 % kLines]; }
  bool is_library(const InterpreterStack::Frame& frame, size_t depth);
  // The same by CPython's public functions; `caller` is the frame that is found then, as far as it is known.
  uint32_t find(InterpreterStack::Frame caller);
  bool is_library(nb::handle code);
  // `called`: the code of the library's function that the program calls in that frame.
  uint32_t number_of(const FrameObject& frame, InterpreterStack::Frame caller, nb::handle called);
  // Its name as FlightRecordView::function has it.
  std::string function_of(nb::handle code) const;

  FlightRecord& record_;
  const std::string own_directory_;
  InterpreterStack stack_;
  alignas(64) std::array<PyObject*, 4> recent_{};  // the library's code objects of recent calls, by depth
  std::array<CallingLine, kLines> lines_{};
  std::array<Code, kLines> codes_{};
  std::unordered_map<PyObject*, nb::object> kept_;                   // all code objects above
  std::map<std::pair<std::string, std::string>, uint32_t> numbers_;  // of lines and functions
};

}  // namespace procgroup
