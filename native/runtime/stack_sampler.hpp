// Takes the Python stack of a thread of this process while that thread does anything else: it runs, sleeps in a system
// call, or is in C code with the interpreter's lock held.
//
//     sample(thread) ── tgkill(signal) ──> the thread's handler: Python's faulthandler writes its stack to the file,
//                                          then this one's marks the end
//                    <── reads the file ──
//
// Python's handler was registered for the signal before (procgroup.process.stack_signal), and is called by the one that
// is installed here. It reads only the frames of its own thread, and takes no lock. A system call of the thread is
// restarted where the kernel can do that, and otherwise by Python.
//
// Source: Python's documentation of faulthandler.register; PEP 475.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

namespace procgroup {

class StackSampler {
 public:
  // The one of this process: handlers belong to processes.
  static StackSampler& of_process();

  // Python's handler for `signal` writes to `file`, which stays open. Frames of the files whose path begins with
  // `left_out` are left out of the stacks, unless that is empty.
  void install(int signal, int file, std::string left_out = "");

  // The text of the stack; empty where the thread has ended or does not take the signal within 0.1 s, or where the
  // program has given the signal another handler.
  std::string sample(pid_t thread);

 private:
  StackSampler() = default;
  bool is_installed() const;

  std::mutex mutex_;  // guards the members below
  int signal_ = 0;
  int file_ = -1;
  std::string left_out_;
};

}  // namespace procgroup
