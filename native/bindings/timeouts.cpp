#include "timeouts.hpp"

#include "bindings.hpp"

using namespace nanobind::literals;

namespace procgroup {
namespace {

// The context variable of procgroup.timeout, once it has been set for the first time. Kept until the process ends: it
// is read under the interpreter's lock alone.
PyObject* variable = nullptr;

void read_context_seconds_from(nb::object context_variable) {
  if (variable == nullptr) variable = context_variable.release().ptr();
}

}  // namespace

double seconds_of(nb::handle timeout) {
  if (PyFloat_CheckExact(timeout.ptr())) {
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (seconds >= 0) return seconds;
  }
  return nb::cast<double>(nb::module_::import_("procgroup.types").attr("seconds")(timeout));
}

std::optional<double> context_seconds() {
  if (variable == nullptr) return std::nullopt;
  const nb::object seconds = nb::handle(variable).attr("get")();
  return seconds.is_none() ? std::nullopt : std::optional(nb::cast<double>(seconds));
}

}  // namespace procgroup

using namespace procgroup;

void bind_timeouts(nb::module_& module) {
  module.def("read_context_seconds_from", &read_context_seconds_from, "context_variable"_a,
             nb::sig("def read_context_seconds_from(context_variable: contextvars.ContextVar[float | None]) -> None"));
}
