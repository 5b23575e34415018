// A task: what moves the bytes of one call in place of the engine's transport, or beside it.
//
//     MPI                  a request of MPI, polled   mpi/mpi_transfer.hpp
//     NCCL                 work on a GPU              nccl/nccl_task.hpp
//     staging              copies from and to a GPU   cuda/staging.hpp
//     a program's backend  a generator of Python      bindings/python_task.hpp
//
// Staging is around another task, or around the engine's transport.
//
//                  issued        the ranks agree                      the bytes have moved
//     the engine ----+----------------+----------------------------------------+------------
//                    |  ready ..      | start      test ..       test          |
//     the task                        |                                        |
//
// Where the engine itself moves the bytes, between memory that the task has prepared, `start` comes after that.
#pragma once

#include <cstdint>
#include <vector>

namespace procgroup {

// Nothing wakes a waiter when a task has moved something: this is how long it sleeps at most between two looks.
inline constexpr int64_t kTaskSleepNs = 200'000;

class Task {
 public:
  enum class State : uint8_t {
    kPending,  // of a call in a graph: whether it runs is not known
    kQueued,   // on a device, in order with whatever uses the arrays there: the call ends, and the group follows the
               // task
    kIdle,     // a call in a graph of such work that runs again when the program launches it, and does not run now
    kCompleted,
  };

  virtual ~Task() = default;

  // Whether the call may begin: a device may still have to produce what it reads. Polled by the thread that would begin
  // the call, without the language's lock, as are the next two. All of them throw what makes the call fail.
  virtual bool ready() { return true; }
  // Called once, when all ranks are known to agree. `root` is the root; of a message, the other rank. `number` is the
  // same on all ranks of the call: of a collective, its sequence number; of a message, the number that its sender gave
  // to no other message.
  virtual void start(int root, uint64_t number) = 0;
  // Do what can be done now. From any thread, one at a time. While the task is pending, `awaited` gets the group ranks
  // that it waits for, where it knows them.
  virtual State test(std::vector<int>& awaited) = 0;
  // The call has failed, and nothing more is to be moved. Does not wait. Called at most once, instead of further tests.
  virtual void cancel() {}
  // Whether it may have written to the caller's arrays before it was started.
  virtual bool may_have_written() const { return false; }
  // At most between two tests, or two looks at `ready`. 0 for a task that moves only while it is tested: it is tested
  // also after it has completed, because other ranks may still need it.
  virtual int64_t longest_sleep_ns() const { return kTaskSleepNs; }
};

}  // namespace procgroup
