#include "interpreter_stack.hpp"

#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <optional>

namespace procgroup {
namespace {

// Frames without Python code that the interpreter may have between two others.
constexpr int kMostBetween = 2;

// Read a word of this process's memory; nothing where there is none, or where the system refuses that.
template <class Value>
std::optional<Value> read(const void* base, size_t offset) {
  Value value{};
  const iovec to{&value, sizeof value};
  const iovec from{static_cast<std::byte*>(const_cast<void*>(base)) + offset, sizeof value};
  if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != sizeof value) return std::nullopt;
  return value;
}

// Public functions of CPython that its limited API lacks.
using GetBack = PyFrameObject* (*)(PyFrameObject*);
using GetInstruction = int (*)(PyFrameObject*);

const GetBack get_back = reinterpret_cast<GetBack>(dlsym(RTLD_DEFAULT, "PyFrame_GetBack"));
const GetInstruction get_instruction = reinterpret_cast<GetInstruction>(dlsym(RTLD_DEFAULT, "PyFrame_GetLasti"));

}  // namespace

FrameObject FrameObject::innermost() {
  if (get_back == nullptr || get_instruction == nullptr) return FrameObject({});
  return FrameObject(nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
}

FrameObject FrameObject::caller() const { return FrameObject(nb::steal(reinterpret_cast<PyObject*>(get_back(get())))); }

nb::object FrameObject::code() const { return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(get()))); }

int FrameObject::instruction() const { return get_instruction(get()); }

int FrameObject::line() const { return PyFrame_GetLineNumber(get()); }

InterpreterStack::Layout InterpreterStack::layout_of_this_version() {
#ifndef Py_GIL_DISABLED
  if constexpr (sizeof(void*) == 8) switch (Py_Version >> 16) {
      case 0x30b:
        return {.current = 56, .behind = 8, .code = 32, .caller = 48, .instruction = 56};
      case 0x30c:
        return {.current = 56, .behind = 0, .code = 0, .caller = 8, .instruction = 56};
      case 0x30d:
      case 0x30e:
        return {.current = 72, .behind = -1, .code = 0, .caller = 8, .instruction = 56};
    }
#endif
  return {};
}

InterpreterStack::State InterpreterStack::comparison() const {
  std::optional<const void*> next = read<const void*>(PyThreadState_Get(), layout_.current);
  if (next && layout_.behind >= 0) next = read<const void*>(*next, static_cast<size_t>(layout_.behind));
  std::optional<uintptr_t> distance;  // from a code object to its first instruction
  int frames = 0;
  for (FrameObject frame = FrameObject::innermost(); frame; frame = frame.caller(), ++frames) {
    const auto code = reinterpret_cast<uintptr_t>(frame.code().ptr());
    std::optional<uintptr_t> found;
    std::optional<uintptr_t> instruction;
    for (int between = 0; found != code; ++between) {
      if (!next || between > kMostBetween) return State::kUnusable;
      found = read<uintptr_t>(*next, layout_.code);
      instruction = read<uintptr_t>(*next, layout_.instruction);
      next = read<const void*>(*next, layout_.caller);
      if (!found || !instruction) return State::kUnusable;
      *found &= ~kTag;
    }
    const uintptr_t first = *instruction - static_cast<uintptr_t>(frame.instruction()) - code;
    if (distance.value_or(first) != first) return State::kUnusable;
    distance = first;
  }
  return frames < 2 ? State::kUnknown : State::kUsable;
}

}  // namespace procgroup
