// The Python module procgroup._native: each room of the engine binds itself in a file of its own.
#include "bindings.hpp"

NB_MODULE(_native, module) {
  module.doc() = "The native engine of procgroup; use the procgroup package instead.";
  bind_kernels(module);
}
