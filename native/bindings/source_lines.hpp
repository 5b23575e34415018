// Finds the line of the program that makes a call: the innermost frame that is not procgroup's own, nor PyTorch's.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "runtime/flight_record.hpp"

namespace procgroup {

namespace nb = nanobind;

// The numbered source lines of one flight record. With the interpreter's lock. A line is found once for each place of
// the program that makes calls, and known from then on by its code object, which is kept, and its instruction.
class SourceLines {
 public:
  explicit SourceLines(FlightRecord& record) : record_(record) {}

  // The number of the calling line in the record; 0 where no Python code of the program is on the stack, or where the
  // record has no room for more lines.
  uint32_t here();

 private:
  struct Place {
    PyObject* code = nullptr;
    int instruction = 0;
    uint32_t number = 0;
  };
  static constexpr size_t kPlaces = 256;
  static constexpr size_t kMostCodes = 4096;

  static size_t slot(PyObject* code, int instruction);
  bool is_library(PyObject* code);
  uint32_t number_of(PyFrameObject* frame, PyObject* code);

  FlightRecord& record_;
  std::array<Place, kPlaces> places_{};             // where a place is found depends on its address
  std::array<Place, kPlaces> codes_{};              // the same for code objects; `number` is 1 for a library's
  std::unordered_map<PyObject*, nb::object> kept_;  // all code objects of both
  std::unordered_map<std::string, uint32_t> numbers_;
};

}  // namespace procgroup
