// The thread that advances what was issued asynchronously, on every queue, and never blocks in one.
//
// It is started with the first asynchronous call. While nothing is pending it sleeps on a condition
// variable of its own, so that peers see no sleeper on the process's doorbell and save the system call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/waiting.hpp"

namespace procgroup {

// Something that has operations to advance: a group.
class Source {
 public:
  virtual ~Source() = default;
  // Advance what can be advanced now; kDone when nothing is left to do.
  virtual Progress advance_pending() = 0;
  // End what has been ended from outside: deadlines, lost peers, aborts.
  virtual void examine_pending() = 0;
  // Beside `waited`, for which a thread waits and which awaits these world ranks: the number of pending receives of
  // large messages from them that nothing has matched. Nothing when what is pending could end the wait of another rank
  // (liveness/deadlock.hpp).
  virtual std::optional<size_t> open_receives(const Operation& waited, const std::vector<int>& awaited) = 0;
  // See Operation::longest_sleep_ns.
  virtual int64_t longest_sleep_ns() = 0;
  // Note what is pending. Return whether some of it has been noted before, or needs this thread at once.
  virtual bool note_pending() = 0;
};

class ProgressThread {
 public:
  ProgressThread(Waiter& waiter, const WaitPolicy& policy);
  ~ProgressThread();

  // The source must be removed before it ends. After remove() this thread does not touch it.
  void add(Source* source);
  void remove(Source* source);
  // There is work: start the thread if it does not run yet, wake it if it sleeps.
  void notify();
  // The same for work that can wait a little: most messages have completed by then, and wake no thread.
  void notify_soon();
  // Of all sources together.
  std::optional<size_t> open_receives(const Operation& waited, const std::vector<int>& awaited);
  // Stop and join. What is pending stays pending.
  void stop();

 private:
  void run();
  void start();
  Progress advance_all();
  int64_t longest_sleep_ns();
  void examine_all();
  bool note_pending();
  void rest(std::unique_lock<std::mutex>& lock);

  Waiter& waiter_;
  const WaitPolicy& policy_;
  std::mutex mutex_;  // guards thread_, and is held to sleep on changed_
  std::condition_variable changed_;
  std::atomic<bool> work_{false};  // there is some for which the thread has not looked
  std::atomic<bool> stop_{false};
  std::atomic<bool> sleeps_{true};  // on changed_, or does not run yet
  std::atomic<bool> soon_{false};   // the thread rests, or is to, and looks at everything afterwards
  std::thread thread_;
  std::mutex pass_;  // guards sources_; held while they are advanced, so that remove() waits for the end of a pass
  std::vector<Source*> sources_;
};

}  // namespace procgroup
