// From a failure, as data, to an exception of procgroup.errors.
#pragma once

#include <nanobind/nanobind.h>

#include "group/group.hpp"

namespace procgroup {

// Raise a Python exception object.
[[noreturn]] void raise(nanobind::handle exception);
// The exception, with the backend's exception, if any, as its cause; a backend's KeyboardInterrupt or other
// BaseException itself.
nanobind::object with_cause(nanobind::object exception, nanobind::handle cause);
nanobind::object build_exception(const Failure& failure, const Descriptor& call, const Group& group);
// The same, for what `data` has named already: op, sequence, group, rank, size.
nanobind::object build_exception(const Failure& failure, nanobind::dict data);

}  // namespace procgroup
