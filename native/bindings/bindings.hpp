// One function per package: each adds its names to procgroup._native.
#pragma once

#include <nanobind/nanobind.h>

void bind_arena_memory(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_flight_record(nanobind::module_& module);
void bind_group(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_log(nanobind::module_& module);
void bind_mpi(nanobind::module_& module);
void bind_nccl(nanobind::module_& module);
void bind_object_headers(nanobind::module_& module);
void bind_stores(nanobind::module_& module);
void bind_timeouts(nanobind::module_& module);
void bind_work(nanobind::module_& module);
void bind_xla(nanobind::module_& module);
