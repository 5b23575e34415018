// Liveness: a process's peers on one host are notified of its end, whatever ended it.
//
// Vocabulary. A *life word* is in memory that the peers map. Its *owner* holds it, as a lock that it
// never releases while it lives. The peers *watch* it:
//
//     0                            nobody holds it: the owner *left* in order
//     thread id | FUTEX_WAITERS    held: the owner lives (also when it is stopped or stuck)
//     FUTEX_OWNER_DIED (| WAITERS) the kernel took it from a thread that ended: the owner is *lost*
//
//        owner                          kernel                        watchers
//     LifeLock thread --holds--> word                          futex_waitv(words...)
//           X  SIGKILL, exit, exec  --> word = OWNER_DIED
//                                       wakes one waiter  ------> reads all words,
//                                                                 wakes the other waiters of this word
//
// The kernel does this for every thread that registered a robust list, before it takes the process's
// memory apart: pidfd and socket report the end only after that, which takes most of a second for 10 GiB.
// Should the woken watcher die before it wakes the others, then its own life word wakes one of its
// watchers, who reads all words. Besides, every watcher looks each kLookNs.
//
// The second signal is the end of a Unix socket, for kernels and sandboxes without robust futexes.
// Thread ids are never compared: they mean nothing in another pid namespace. Elapsed time is no sign of
// death either.
//
// Source: Linux, Documentation/locking/robust-futexes.rst and robust-futex-ABI.rst.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/futex.hpp"

namespace procgroup {

struct LifeWord {
  std::atomic<uint32_t> word{0};

  // Whether the owner lives, according to the word. The kernel marks the word before it takes the memory apart.
  bool is_held() const {
    const uint32_t value = word.load(std::memory_order_seq_cst);
    return value != 0 && (value & FUTEX_OWNER_DIED) == 0;
  }
  bool is_left() const { return word.load(std::memory_order_seq_cst) == 0; }
  bool is_lost() const { return (word.load(std::memory_order_seq_cst) & FUTEX_OWNER_DIED) != 0; }
};

// Holds a life word for this process, from construction to release(), on a thread of its own: threads of
// the program come and go while the process lives. Construct it before peers can see the word.
// In a forked child the thread does not exist; the object must not be destroyed there.
class LifeLock {
 public:
  explicit LifeLock(LifeWord& word);
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;
  ~LifeLock() { release(); }

  // Leave in order: watchers report on_left. Does nothing the second time.
  void release();

  // Whether the kernel marks the word; without, peers learn of a death from the socket.
  bool is_robust() const { return robust_; }

 private:
  enum State : uint32_t { kStarting, kHeld, kReleasing };

  void hold();
  void enter(State state);
  void await_change(State from);

  LifeWord& word_;
  bool robust_ = false;                     // written before kHeld
  std::atomic<uint32_t> state_{kStarting};  // release by the thread that changes it, acquire by the one that waits
  std::thread thread_;
};

// Watches the life words of any number of peers on one thread, and reports each peer's end exactly once.
// The callbacks run on that thread, without a lock held; they may call watch() and forget().
// In a forked child the thread does not exist; the object must not be destroyed there.
class LifeWatcher {
 public:
  enum class Waiting {
    kFutexes,  // sleep on the words themselves where the kernel can (futex_waitv, Linux 5.16)
    kPolling,  // look at them every 20 ms
  };
  using OnLost = std::function<void(int peer, const std::string& how)>;
  using OnLeft = std::function<void(int peer)>;

  LifeWatcher(OnLost on_lost, OnLeft on_left, Waiting waiting = Waiting::kFutexes);
  LifeWatcher(const LifeWatcher&) = delete;
  LifeWatcher& operator=(const LifeWatcher&) = delete;
  // Must not run on the watcher's own thread. No callback runs after it.
  ~LifeWatcher();

  // Start to watch; a word that is already 0 is reported as left. `socket` is a connected Unix socket to
  // the peer, or -1. Both must stay valid until forget(), or until the peer's end was reported.
  void watch(int peer, LifeWord& word, int socket = -1);
  // Stop watching: neither word nor socket is touched again. A report that is already under way may
  // still arrive.
  void forget(int peer);

 private:
  struct Watched {
    int peer;
    LifeWord* word;
    int socket;
    int64_t closed_at_ns;  // when the socket was first seen closed; 0 when it is open
  };
  struct Verdict {
    int peer;
    std::optional<std::string> lost;  // how; nothing when the peer left
  };
  struct Sleep {
    std::atomic<uint32_t>* word;
    uint32_t value;
  };

  void run();
  std::vector<Verdict> examine();
  std::optional<Verdict> judge(Watched& watched, uint32_t value, bool socket_is_closed) const;
  std::vector<bool> closed_sockets() const;
  void sleep();
  bool sleep_on_words(int64_t nanoseconds);
  void change();

  const OnLost on_lost_;
  const OnLeft on_left_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> changes_{0};  // the watcher's own futex: release by the changing thread, acquire by run()
  std::mutex mutex_;                  // guards watched_, and the words in it against forget()
  std::vector<Watched> watched_;
  Waiting waiting_;            // only run()'s thread, from here on
  std::vector<Sleep> sleeps_;  // what to sleep on, as it was when it was examined
  std::thread thread_;
};

}  // namespace procgroup
