// The engine's view of Python: the interpreter's lock, and the signals that Python handles.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <unordered_set>
#include <utility>

#include "runtime/language_runtime.hpp"

#ifdef Py_LIMITED_API
// Every CPython so far exports these, but its stable ABI does not promise them: weak, so that the module is loaded
// where a later one has none.
extern "C" {
[[gnu::weak]] PyInterpreterState* PyInterpreterState_Head(void);
[[gnu::weak]] PyInterpreterState* PyInterpreterState_Next(PyInterpreterState*);
[[gnu::weak]] PyThreadState* PyInterpreterState_ThreadHead(PyInterpreterState*);
[[gnu::weak]] PyThreadState* PyThreadState_Next(PyThreadState*);
}
#endif

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

  // Run the handlers of signals that have come; throw what a handler raises.
  void check_signals() {
    take_lock_back(state_);
    std::exception_ptr raised;
    if (PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nanobind::python_error());
    state_ = PyEval_SaveThread();
    if (raised) std::rethrow_exception(raised);
  }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

// Takes the interpreter's lock until the end of the scope, in a thread that does not have it. Python need not know
// the thread. PyGILState_Ensure crashes once the interpreter has ended, which may happen between Py_IsInitialized and
// that call, so a thread that may wait that long uses Unlocked::check_signals.
class Relocked {
 public:
  Relocked() {
    if (Py_IsInitialized() == 0)
      for (;;) ::pause();  // see take_lock_back
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      for (;;) ::pause();  // see take_lock_back
    }
  }
  Relocked(const Relocked&) = delete;
  Relocked& operator=(const Relocked&) = delete;
  ~Relocked() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// The end of what owns Python objects, on whatever thread; never after the interpreter.
template <class Owned>
void delete_with_lock(Owned* owned) {
  if (Py_IsInitialized() == 0) return;
  const Relocked relocked;
  delete owned;
}

// An exception that a signal's handler raised on this thread while it advanced a backend's transfer, perhaps for
// another call than the one that the thread waits for. An owned reference, or null.
inline constinit thread_local PyObject* raised_in_transfer = nullptr;

// Raise it, if there is one, and forget it.
inline void raise_what_a_transfer_raised() {
  const nanobind::object raised = nanobind::steal(std::exchange(raised_in_transfer, nullptr));
  if (!raised.is_valid()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw nanobind::python_error();
}

// The threads of a world whose ranks are threads: its ranks, and threads that await them. Under the interpreter's lock.
class RankThreads {
 public:
  void add_this() { threads_.insert(PyThreadState_GetID(PyThreadState_Get())); }
  bool has(PyThreadState* thread) const { return threads_.contains(PyThreadState_GetID(thread)); }

 private:
  std::unordered_set<uint64_t> threads_;  // Python never gives a number again
};

// The threads that procgroup starts. They end no wait while they are idle. While one has a task, such as a callback of
// a call that has completed, it may make a call, and so counts as another thread. Guarded by the GIL.
class OwnThreads {
 public:
  struct EndsTask {
    EndsTask() = default;
    EndsTask(const EndsTask&) = delete;
    ~EndsTask() { of_process().add_tasks(-1); }
  };

  static OwnThreads& of_process() {
    static OwnThreads threads;
    return threads;
  }
  void add_this() { threads_.insert(PyThreadState_GetID(PyThreadState_Get())); }
  bool has(PyThreadState* thread) const { return threads_.contains(PyThreadState_GetID(thread)); }
  void add_tasks(int count) { tasks_ += count; }
  bool have_tasks() const { return tasks_ > 0; }
  void forget() { *this = {}; }  // in a forked child, which has none of them

 private:
  std::unordered_set<uint64_t> threads_;  // as above
  int tasks_ = 0;
};

// Set for good where threads that Python does not know before may make calls: none shows in Python's list of threads.
inline std::atomic<bool> unknown_threads_may_call{false};

class PythonRuntime final : public LanguageRuntime {
 public:
  // `ranks` where ranks are threads: those do not count as others.
  explicit PythonRuntime(const RankThreads* ranks = nullptr) : ranks_(ranks) {}
  void unlock() override { state_ = PyEval_SaveThread(); }
  void lock() override { take_lock_back(state_); }
  bool interrupted() override {
    lock();
    if (PyErr_CheckSignals() != 0) raised_ = std::make_exception_ptr(nanobind::python_error());
    unlock();
    return raised_ != nullptr || raised_in_transfer != nullptr;
  }
  bool alone() override {
    // A signal's handler runs in the main thread, which is none of the ranks where those are threads.
    if (unknown_threads_may_call.load(std::memory_order_relaxed) || (ranks_ == nullptr && has_alarm())) return false;
    lock();
    const bool alone = !others_run();
    unlock();
    return alone;
  }
  // Raise what a signal handler raised, if one did. Also for a call that went well: it may complete after the signal.
  void rethrow() const {
    if (raised_) std::rethrow_exception(raised_);
    raise_what_a_transfer_raised();
  }

 private:
  static bool has_alarm() {
    itimerval alarm{};
    return getitimer(ITIMER_REAL, &alarm) != 0 || alarm.it_value.tv_sec != 0 || alarm.it_value.tv_usec != 0;
  }
  bool others_run() const {
    const OwnThreads& own = OwnThreads::of_process();
    if (own.have_tasks()) return true;
#ifdef Py_LIMITED_API
    if (!PyInterpreterState_Head || !PyInterpreterState_Next || !PyInterpreterState_ThreadHead || !PyThreadState_Next)
      return true;  // unknown: no deadlock is reported, and calls end at their deadlines
#endif
    for (PyInterpreterState* one = PyInterpreterState_Head(); one != nullptr; one = PyInterpreterState_Next(one))
      for (PyThreadState* thread = PyInterpreterState_ThreadHead(one); thread != nullptr;
           thread = PyThreadState_Next(thread))
        if (thread != PyThreadState_Get() && !own.has(thread) && !(ranks_ != nullptr && ranks_->has(thread)))
          return true;
    return false;
  }

  const RankThreads* const ranks_;
  PyThreadState* state_ = nullptr;
  std::exception_ptr raised_;
};

// For a call of a thread that does not have the interpreter's lock, and that Python need not know. Other threads may
// make calls meanwhile: it is never alone.
class UnlockedPythonRuntime final : public LanguageRuntime {
 public:
  void unlock() override {}
  void lock() override {}
  bool interrupted() override {
    // Python runs the handlers of signals in a thread that it knows.
    if (PyThreadState* const state = PyGILState_GetThisThreadState(); state != nullptr) {
      take_lock_back(state);
      if (PyErr_CheckSignals() != 0) raised_ = std::make_exception_ptr(nanobind::python_error());
      PyEval_SaveThread();
    }
    return raised_ != nullptr || raised_in_transfer != nullptr;
  }
  // As PythonRuntime::rethrow().
  void rethrow() const {
    if (raised_) std::rethrow_exception(raised_);
    if (raised_in_transfer == nullptr) return;
    const Relocked relocked;
    raise_what_a_transfer_raised();
  }

 private:
  std::exception_ptr raised_;
};

}  // namespace procgroup
