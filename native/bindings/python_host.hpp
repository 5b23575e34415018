// The engine's view of Python: the interpreter's lock, and the signals that Python handles.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "engine/host.hpp"

namespace procgroup {

class PythonHost final : public Host {
 public:
  void unlock() override { state_ = PyEval_SaveThread(); }
  void lock() override { PyEval_RestoreThread(state_); }
  bool interrupted() override {
    lock();
    if (PyErr_CheckSignals() != 0) raised_ = std::make_exception_ptr(nanobind::python_error());
    unlock();
    return raised_ != nullptr;
  }
  // Raise what a signal handler raised, if one did.
  void rethrow() const {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  PyThreadState* state_ = nullptr;
  std::exception_ptr raised_;
};

}  // namespace procgroup
