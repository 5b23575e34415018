#include "arena_memory.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "bindings.hpp"
#include "python_engine.hpp"

namespace procgroup {
namespace {

// What a forked child is to have copies of; under fork_mutex(). It lives for ever, as fork handlers do.
std::vector<ArenaMemory*>& copied_by_fork() {
  static auto* memories = new std::vector<ArenaMemory*>;
  return *memories;
}

}  // namespace

ArenaMemory::ArenaMemory(std::shared_ptr<Arena> arena, size_t bytes, bool is_copied)
    : arena_(std::move(arena)),
      bytes_(bytes),
      offset_(arena_->allocate(bytes)),
      data_(arena_->at(offset_, bytes)),
      copied_by_fork_(is_copied),
      owner_(getpid()) {
  if (!copied_by_fork_) {
    madvise(data_, bytes_, MADV_DOFORK);  // the rest of the arena is not there in a child
    return;
  }
  static const bool installed = (use_in_forked_child(copy_in_forked_child), true);
  static_cast<void>(installed);
  const std::lock_guard lock(fork_mutex());
  copied_by_fork().push_back(this);
}

// The parent's pages, until the child writes to them. Where that is refused, there is nothing to write to.
void ArenaMemory::copy_in_forked_child() {
  for (const ArenaMemory* memory : copied_by_fork())
    mmap(memory->data_, memory->bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
         memory->arena_->descriptor(), static_cast<off_t>(memory->offset_));
  copied_by_fork().clear();
}

ArenaMemory::~ArenaMemory() {
  if (getpid() != owner_) {
    // The child's copy of the allocator's state, and its lock, may be in any state.
    new std::shared_ptr<Arena>(std::move(arena_));
    return;
  }
  if (copied_by_fork_) {
    const std::lock_guard lock(fork_mutex());
    std::erase(copied_by_fork(), this);
  } else {
    madvise(data_, bytes_, MADV_DONTFORK);
  }
  arena_->release(offset_);
}

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const ArenaMemory& memory = *nb::inst_ptr<ArenaMemory>(self);
  return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.bytes()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// None where the ranks do not share memory.
nb::object allocate(const PythonEngine& self, size_t bytes, bool copied_by_fork) {
  std::shared_ptr<Arena> arena = self.engine()->shared_arena();
  if (!arena || bytes == 0) return nb::none();
  try {
    return nb::cast(std::make_shared<ArenaMemory>(std::move(arena), bytes, copied_by_fork));
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
  module.def("allocate", &allocate, nb::arg("engine"), nb::arg("nbytes"), nb::arg("copied_by_fork"),
             nb::sig("def allocate(engine: Engine, nbytes: int, copied_by_fork: bool) -> ArenaMemory | None"));
}
