// The engine's view of Python: the interpreter's lock, and the signals that Python handles.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/time.h>
#include <unistd.h>

#include <exception>

#include "engine/host.hpp"

namespace procgroup {

// Take the interpreter's lock back. While the interpreter ends, Python ends a thread that asks for the lock by
// unwinding its stack, which C++ destructors do not allow: such a thread stops here and ends with the process.
inline void take_lock_back(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) ::pause();
  }
}

// Lets other threads run Python until the end of the scope.
class Unlocked {
 public:
  Unlocked() = default;
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { take_lock_back(state_); }

 private:
  PyThreadState* const state_ = PyEval_SaveThread();
};

class PythonHost final : public Host {
 public:
  void unlock() override { state_ = PyEval_SaveThread(); }
  void lock() override { take_lock_back(state_); }
  bool interrupted() override {
    lock();
    if (PyErr_CheckSignals() != 0) raised_ = std::make_exception_ptr(nanobind::python_error());
    unlock();
    return raised_ != nullptr;
  }
  bool alone() override {
    itimerval alarm{};
    if (getitimer(ITIMER_REAL, &alarm) != 0 || alarm.it_value.tv_sec != 0 || alarm.it_value.tv_usec != 0) return false;
    lock();
    int threads = 0;
    for (PyInterpreterState* one = PyInterpreterState_Head(); one != nullptr; one = PyInterpreterState_Next(one))
      for (PyThreadState* thread = PyInterpreterState_ThreadHead(one); thread != nullptr;
           thread = PyThreadState_Next(thread))
        ++threads;
    unlock();
    return threads == 1;
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
