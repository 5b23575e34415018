#include "frame_object.hpp"

#include <dlfcn.h>

namespace procgroup {
namespace {

namespace nb = nanobind;

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

}  // namespace procgroup
