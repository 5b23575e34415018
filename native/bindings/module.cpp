// The Python module procgroup._native: each room of the engine binds itself in a file of its own.
#include "bindings.hpp"

NB_MODULE(_native, module) {
  module.doc() = "The native engine of procgroup; use the procgroup package instead.";
  // Objects that live until the process ends, such as a store that a module holds, are no mistake.
  nanobind::set_leak_warnings(false);
  bind_kernels(module);
  bind_stores(module);
}
