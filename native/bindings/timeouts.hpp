// Timeouts as Python gives them: a number of seconds, a timedelta, or None. None is the timeout of the innermost
// `with procgroup.timeout(...)` in the context of the caller, and outside of one that of the group.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

namespace procgroup {

namespace nb = nanobind;

// Throws what procgroup.types.seconds raises for what is no timeout.
double seconds_of(nb::handle timeout);

// The seconds of the innermost `with procgroup.timeout(...)`. A process that has entered none does not ask Python.
std::optional<double> context_seconds();

}  // namespace procgroup
