// A task that a program's own backend moves, in Python: a generator, advanced with the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "array_view.hpp"
#include "ops/request.hpp"

namespace procgroup {

// The memory of a call's blocks: its arrays, and the scratch memory that the function `before` of its request owns.
struct KeptMemory {
  std::vector<ArrayView> arrays;
  std::function<void()> scratch;
};

// Ends with the interpreter's lock, on whatever thread; never after the interpreter.
std::shared_ptr<const KeptMemory> keep(std::vector<ArrayView> arrays, std::function<void()> scratch);

class PythonTask final : public Task {
 public:
  // `start`, called with a root and a number, returns the generator. `size` is that of the group.
  PythonTask(nanobind::object start, int size, std::shared_ptr<const KeptMemory> memory)
      : start_(std::move(start)), size_(size), memory_(std::move(memory)) {}

  // They throw std::runtime_error for a Python exception. With or without the interpreter's lock.
  void start(int root, uint64_t number) override;
  State test(std::vector<int>& awaited) override;
  void cancel() override;
  // The exception that the backend raised, if any.
  nanobind::handle error() const { return error_; }

 private:
  template <class Step>
  auto run(Step step);
  void fail(nanobind::python_error& raised);

  nanobind::object start_;
  const int size_;
  std::shared_ptr<const KeptMemory> memory_;
  nanobind::object generator_;
  nanobind::object error_;
};

// A task without memory.
std::shared_ptr<PythonTask> make_python_task(nanobind::object start, int size,
                                             std::shared_ptr<const KeptMemory> memory = nullptr);
// The task of a call. `prepare` is procgroup.groups.backend.prepare of a backend. It raises where the backend does not
// support the call.
std::shared_ptr<PythonTask> prepare_task(const nanobind::object& prepare, const Request& request,
                                         std::vector<ArrayView> arrays, int rank, int size, uint64_t tag = 0);

// The blocks that this rank gives, and that it takes: those of the request, or `one`.
std::span<const Block> inputs_of(const Request& request, int rank, Block& one);
std::span<const Block> outputs_of(const Request& request, int rank, Block& one);

// Raise DistBackendError if this thread is inside a backend's generator: the call `what` may wait there for what only
// this thread moves, or for a lock that it holds.
void require_outside_transfer(const char* what);
bool inside_transfer();

}  // namespace procgroup
