// The kinds of stores that procgroup._native binds; each function adds its classes to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace procgroup::store {

// StoreRequests, the base class of the others.
void bind_requests(nanobind::module_& module);
// StoreServer and StoreClient, over TCP.
void bind_tcp_store(nanobind::module_& module);
// InProcessStore, for the threads of a process.
void bind_in_process_store(nanobind::module_& module);
// StoreTable and ForwardedRequests, for a store whose requests Python code runs.
void bind_table(nanobind::module_& module);

}  // namespace procgroup::store
