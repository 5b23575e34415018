// The Python module procgroup._native: each package of the engine binds itself in a file of its own.
#include <exception>
#include <system_error>

#include "bindings.hpp"

NB_MODULE(_native, module) {
  module.doc() = "The native engine of procgroup; use the procgroup package instead.";
  // A group that is still alive when the interpreter ends is no defect: programs need not destroy theirs.
  nanobind::set_leak_warnings(false);
  // A system error that no binding translates becomes OSError.
  nanobind::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      PyErr_SetString(PyExc_OSError, error.what());
    }
  });
  bind_engine(module);
  bind_flight_record(module);
  bind_work(module);
  bind_group(module);
  bind_arena_memory(module);
  bind_kernels(module);
  bind_log(module);
  bind_mpi(module);
  bind_nccl(module);
  bind_object_headers(module);
  bind_stores(module);
  bind_timeouts(module);
  bind_xla(module);
}
