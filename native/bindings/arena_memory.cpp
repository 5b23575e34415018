#include "arena_memory.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <system_error>
#include <utility>

#include "bindings.hpp"
#include "python_engine.hpp"

namespace procgroup {

ArenaMemory::ArenaMemory(std::shared_ptr<Arena> arena, size_t bytes)
    : arena_(std::move(arena)),
      bytes_(bytes),
      offset_(arena_->allocate(bytes)),
      data_(arena_->at(offset_, bytes)),
      owner_(getpid()) {
  madvise(data_, bytes_, MADV_DOFORK);  // the rest of the arena is not there in a child
}

ArenaMemory::~ArenaMemory() {
  if (getpid() != owner_) {
    // The child's copy of the allocator's state, and its lock, may be in any state.
    new std::shared_ptr<Arena>(std::move(arena_));
    return;
  }
  madvise(data_, bytes_, MADV_DONTFORK);
  arena_->release(offset_);
}

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const ArenaMemory& memory = *nb::inst_ptr<ArenaMemory>(self);
  return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.bytes()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// None where the ranks do not share memory.
nb::object allocate(const PythonEngine& self, size_t bytes) {
  std::shared_ptr<Arena> arena = self.engine()->shared_arena();
  if (!arena || bytes == 0) return nb::none();
  try {
    return nb::cast(std::make_shared<ArenaMemory>(std::move(arena), bytes));
  } catch (const std::system_error&) {
    throw std::bad_alloc();
  }
}

}  // namespace
}  // namespace procgroup

using namespace procgroup;

void bind_arena_memory(nb::module_& module) {
  nb::class_<ArenaMemory>(module, "ArenaMemory", nb::type_slots(buffer_slots))
      .def_prop_ro("nbytes", &ArenaMemory::bytes);
  module.def("allocate", &allocate, nb::arg("engine"), nb::arg("nbytes"),
             nb::sig("def allocate(engine: Engine, nbytes: int) -> ArenaMemory | None"));
}
