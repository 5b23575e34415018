// The Python stack of the calling thread, read in the interpreter's own memory.
//
// CPython's public functions make an object of every frame that they pass, which takes longer than all else that is
// recorded of a small call. Where the interpreter keeps its frames is not part of its stable ABI, but is the same in
// all releases of one minor version. It is known here for some versions, and used only after a comparison: a stack of
// two frames or more, read without the risk of an invalid address, must show the code objects and the instructions that
// the public functions show. Elsewhere the stack stays unusable.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace procgroup {

namespace nb = nanobind;

// A frame as CPython's public functions give it.
class FrameObject {
 public:
  // The innermost frame of the calling thread. None where this interpreter lacks the functions, which every version
  // has from 3.11 on.
  static FrameObject innermost();

  explicit operator bool() const { return object_.is_valid(); }
  FrameObject caller() const;
  nb::object code() const;
  int instruction() const;  // the offset in its code, in bytes
  int line() const;

 private:
  explicit FrameObject(nb::object object) : object_(std::move(object)) {}
  PyFrameObject* get() const { return reinterpret_cast<PyFrameObject*>(object_.ptr()); }

  nb::object object_;
};

class InterpreterStack {
 public:
  // Borrowed from the interpreter. Two calls from one place of one code object have the same.
  struct Frame {
    PyObject* code = nullptr;
    uintptr_t instruction = 0;
  };

  bool is_usable() const { return state_ == State::kUsable; }
  // Compare with the public functions, unless that was done. With the interpreter's lock.
  void compare() {
    if (state_ == State::kUnknown) state_ = comparison();
  }
  // The innermost frame that is not `skipped`; none of it where all are.
  template <class Skipped>
  Frame innermost(const Skipped& skipped) const {
    for (const void* at_frame = current(); at_frame != nullptr; at_frame = at<const void*>(at_frame, layout_.caller)) {
      const Frame frame{code_of(at_frame), at<uintptr_t>(at_frame, layout_.instruction)};
      if (!skipped(frame)) return frame;
    }
    return {};
  }

 private:
  enum class State { kUnusable, kUnknown, kUsable };
  // Offsets in bytes. The innermost frame: in the state of a thread, or, where `behind` is not negative, at `behind` of
  // what is found there. The others: in a frame.
  struct Layout {
    size_t current = 0;
    int behind = 0;
    size_t code = 0;
    size_t caller = 0;
    size_t instruction = 0;
  };
  // From 3.14 on the lowest bits of the address of a code object have another meaning.
  static constexpr uintptr_t kTag = 3;

  static Layout layout_of_this_version();

  template <class Value>
  static Value at(const void* base, size_t offset) {
    Value value;
    std::memcpy(&value, static_cast<const std::byte*>(base) + offset, sizeof value);
    return value;
  }
  const void* current() const {
    const void* const found = at<const void*>(PyThreadState_Get(), layout_.current);
    return layout_.behind < 0 ? found : at<const void*>(found, static_cast<size_t>(layout_.behind));
  }
  PyObject* code_of(const void* frame) const {
    return reinterpret_cast<PyObject*>(at<uintptr_t>(frame, layout_.code) & ~kTag);
  }
  State comparison() const;

  const Layout layout_ = layout_of_this_version();
  State state_ = layout_.current == 0 ? State::kUnusable : State::kUnknown;
};

}  // namespace procgroup
