// The level and the rank of the lines that native threads write: see procgroup/process/log.py.
#include "base/log.hpp"

#include "bindings.hpp"

using namespace nanobind::literals;

void bind_log(nanobind::module_& module) { module.def("set_log", &procgroup::set_log, "lowest_level"_a, "rank"_a); }
