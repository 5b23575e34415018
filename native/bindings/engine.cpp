// Engines for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.hpp"
#include "python_engine.hpp"

using namespace nanobind::literals;

using namespace procgroup;

void bind_engine(nb::module_& module) {
  nb::class_<RankThreads>(module, "RankThreads").def(nb::init<>()).def("add_this", &RankThreads::add_this);
  module.def("add_own_thread", [] { OwnThreads::of_process().add_this(); });
  module.def("add_own_tasks", [](int count) { OwnThreads::of_process().add_tasks(count); }, "count"_a);
  module.def("forget_own_threads", [] { OwnThreads::of_process().forget(); });

  nb::class_<PythonEngine>(module, "Engine")
      .def(
          "__init__",
          [](PythonEngine* self, int rank, int world_size, bool ranks_are_threads, bool shared, std::string record,
             std::string job, std::string program, int global_rank, int global_size) {
            new (self) PythonEngine({.rank = rank,
                                     .world_size = world_size,
                                     .ranks_are_threads = ranks_are_threads,
                                     .record_path = std::move(record),
                                     .recorded = {global_rank, global_size, std::move(job), std::move(program)}},
                                    shared);
          },
          "rank"_a, "world_size"_a, "ranks_are_threads"_a, "shared"_a, nb::kw_only(), "record"_a = "", "job"_a = "",
          "program"_a = "", "global_rank"_a = 0, "global_size"_a = 1)
      .def_prop_ro("rank", [](const PythonEngine& self) { return self.engine()->rank(); })
      .def_prop_ro("world_size", [](const PythonEngine& self) { return self.engine()->world_size(); })
      .def_prop_ro("arena_problem", [](const PythonEngine& self) { return self.engine()->arena_problem(); })
      .def(
          "set_cores", [](PythonEngine& self, int usable, int ranks) { self.engine()->set_cores(usable, ranks); },
          "usable_cores"_a, "local_ranks"_a)
      .def(
          "set_wait_report",
          [](PythonEngine& self, double seconds) {
            self.engine()->set_wait_report(static_cast<int64_t>(std::min(seconds, 1e9) * 1e9));
          },
          "seconds"_a)
      .def("on_first_watch", &PythonEngine::on_first_watch,
           nb::sig("def on_first_watch(self, start: collections.abc.Callable[[], None]) -> None"))
      .def_prop_ro("arena_descriptor", [](const PythonEngine& self) { return self.engine()->arena_descriptor(); })
      .def_prop_ro("arena_bell", [](const PythonEngine& self) { return self.engine()->arena_bell(); })
      .def_prop_ro("record_descriptor", [](const PythonEngine& self) { return self.engine()->record_descriptor(); })
      .def(
          "attach_shared",
          [](PythonEngine& self, int peer, int arena, int bell, int record, int socket) {
            self.engine()->attach_shared(peer, FileDescriptor(arena), FileDescriptor(bell), FileDescriptor(record),
                                         FileDescriptor(socket));
          },
          "peer"_a, "arena"_a, "bell"_a, "record"_a, "socket"_a)
      .def(
          "attach_socket",
          [](PythonEngine& self, int peer, int socket, int64_t pid) {
            self.engine()->attach_socket(peer, FileDescriptor(socket), pid);
          },
          "peer"_a, "socket"_a, "pid"_a)
      .def(
          "set_host",
          [](PythonEngine& self, int peer, std::string host) { self.engine()->set_host(peer, std::move(host)); },
          "peer"_a, "host"_a)
      .def(
          "attach_thread",
          [](PythonEngine& self, int peer, const PythonEngine& engine) {
            self.engine()->attach_thread(peer, *engine.engine());
          },
          "peer"_a, "engine"_a)
      .def(
          "set_rank_threads",
          [](PythonEngine& self, std::shared_ptr<RankThreads> threads) { self.set_rank_threads(std::move(threads)); },
          "threads"_a)
      .def("run_completions", &PythonEngine::run_completions, "seconds"_a)
      .def("records", &PythonEngine::records, nb::sig("def records(self) -> list[dict[str, typing.Any]]"))
      .def("flush", &PythonEngine::flush, "seconds"_a)
      .def_prop_ro("unsent_to", [](const PythonEngine& self) { return self.engine()->unsent_to(); })
      .def(
          "set_global_ranks",
          [](PythonEngine& self, std::vector<int> ranks) { self.engine()->set_global_ranks(std::move(ranks)); },
          "ranks"_a)
      .def_prop_ro("gone_ranks", [](const PythonEngine& self) { return self.engine()->gone_ranks(); })
      .def("fail", &PythonEngine::fail, "reason"_a, "at_once"_a, "origin"_a = "own", "peer"_a = -1)
      .def("shutdown", &PythonEngine::close);
}
