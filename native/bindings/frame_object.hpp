// A frame of the Python stack as CPython's public functions give it.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace procgroup {

class FrameObject {
 public:
  // The innermost frame of the calling thread. None where this interpreter lacks the functions, which every version
  // has from 3.11 on.
  static FrameObject innermost();

  explicit operator bool() const { return object_.is_valid(); }
  FrameObject caller() const;
  nanobind::object code() const;
  int instruction() const;  // the offset in its code, in bytes
  int line() const;

 private:
  explicit FrameObject(nanobind::object object) : object_(std::move(object)) {}
  PyFrameObject* get() const { return reinterpret_cast<PyFrameObject*>(object_.ptr()); }

  nanobind::object object_;
};

}  // namespace procgroup
