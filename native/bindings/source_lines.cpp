#include "source_lines.hpp"

#include <nanobind/stl/string.h>

#include <string_view>

namespace procgroup {
namespace {

// Deeper than any path from a program's line to its call, which JAX may trace.
constexpr int kMostFrames = 64;

std::string file_of(nb::handle code) { return nb::cast<std::string>(code.attr("co_filename")); }

// With the separator at the end.
std::string own_directory() {
  const std::string file = nb::cast<std::string>(nb::module_::import_("procgroup").attr("__file__"));
  return file.substr(0, file.rfind('/') + 1);
}

}  // namespace

SourceLines::SourceLines(FlightRecord& record) : record_(record), own_directory_(own_directory()) {}

uint32_t SourceLines::here() {
  InterpreterStack::Frame caller;
  if (stack_.is_usable()) {
    size_t depth = 0;
    PyObject* called = nullptr;
    caller = stack_.innermost([&](const InterpreterStack::Frame& frame) {
      if (!is_library(frame, depth++)) return false;
      called = frame.code;
      return true;
    });
    if (const CallingLine& line = line_of(caller); line.is_of(caller) && line.called == called) return line.number;
  }
  return find(caller);
}

// Large arrays pass through the caches between two calls: this reads few lines of memory.
bool SourceLines::is_library(const InterpreterStack::Frame& frame, size_t depth) {
  if (depth < recent_.size() && recent_[depth] == frame.code) return true;
  if (line_of(frame).is_of(frame)) return false;
  const Code& code = code_of(frame.code);
  if (code.object != frame.code || !code.is_library) return false;
  if (depth < recent_.size()) recent_[depth] = frame.code;
  return true;
}

uint32_t SourceLines::find(InterpreterStack::Frame caller) {
  stack_.compare();
  FrameObject frame = FrameObject::innermost();
  nb::object called;
  for (int depth = 0; frame && depth < kMostFrames; ++depth, frame = frame.caller()) {
    nb::object code = frame.code();
    if (!is_library(code)) {
      if (caller.code != code.ptr()) caller = {code.ptr(), static_cast<uintptr_t>(frame.instruction())};
      return number_of(frame, caller, called);
    }
    called = std::move(code);
  }
  return 0;
}

bool SourceLines::is_library(nb::handle object) {
  Code& code = code_of(object.ptr());
  if (code.object == object.ptr()) return code.is_library;
  const std::string file = file_of(object);
  const bool is_library = file.starts_with(own_directory_) || file.find("-packages/torch/") != std::string::npos ||
                          file.find("-packages/jax/") != std::string::npos;
  if (kept_.size() < kMostCodes) {
    kept_.try_emplace(object.ptr(), nb::borrow(object));
    code = {object.ptr(), is_library};
  }
  return is_library;
}

uint32_t SourceLines::number_of(const FrameObject& frame, InterpreterStack::Frame caller, nb::handle called) {
  CallingLine& kept = line_of(caller);
  if (kept.is_of(caller) && kept.called == called.ptr()) return kept.number;
  const std::string line = file_of(caller.code) + ":" + std::to_string(frame.line());
  const std::string function = called ? function_of(called) : "";
  const auto [known, is_new] = numbers_.try_emplace({line, function}, 0);
  if (is_new) known->second = record_.add_source_line(line, function);
  const bool are_kept = kept_.contains(caller.code) && (!called || kept_.contains(called.ptr()));
  if (are_kept) kept = {caller, called.ptr(), known->second};
  return known->second;
}

// The public name of a function whose calls are recorded as another operation; empty for all others.
std::string SourceLines::function_of(nb::handle code) const {
  const std::string file = file_of(code);
  if (!file.starts_with(own_directory_)) return "";
  const std::string module = file.substr(own_directory_.size());
  const std::string name = nb::cast<std::string>(code.attr("co_name"));
  if (module.starts_with("functional/")) return "functional." + name;
  return module == "api/objects.py" || name == "monitored_barrier" ? name : "";
}

}  // namespace procgroup
