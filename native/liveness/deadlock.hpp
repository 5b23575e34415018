// Detect cycles of ranks that wait for each other, without false alarms: one would end a correct program.
//
// A rank shows its wait (see WaitEdgeBoard) only when nothing but the awaited rank can end it:
//   - it is a receive from one rank that nothing has matched, a send of a large message that nothing has matched, a
//     collective for which the awaited member has not come, or has not relayed those of its host, or a new group that
//     the awaited member does not make yet;
//   - it lasts a second already (100 ms where ranks are threads), and its own limit is above kShortSeconds: a caller
//   that sets a short one may intend to continue;
//   - no other thread runs Python in this process (ranks that are threads: none but theirs and those that await them;
//   procgroup's own count while they have work);
//   - what else is pending ends the wait of no other rank: no collective, no transfer of another backend, and no
//   receive that a large message could match, see below;
//   - no message to this rank is unread, and none from it unwritten.
// The thread may be in a blocking call, or in the wait for an asynchronous one.
// So a rank that shows a wait acts again only after a message or an arrival from `next`. Take a cycle of ranks
// that all show a wait, each of which has confirmed the epoch of its next one, with all epochs unchanged while this
// was read. Then at one moment all of it was true at once, and no message from a member's next one was on its way:
// messages sent before that one showed its wait had arrived when its epoch was confirmed, and since then it has sent
// none. So no member can ever go on. The cycle must also be found in two checks in a row.
//
// A pending send is no obstacle: a message that it could match has reached the receiver, or is unwritten. A pending
// receive of a small message answers nobody. One of a large message answers the sender, who may be in the cycle, so
// only those are allowed whose sender is `next`: its messages are read before its epoch is confirmed, and when one of
// them has matched such a receive, the wait is shown anew.
//
// The rank that finds the cycle announces it, with the epochs, before it fails; the other members read that, and fail
// with the same text. The finder keeps the verdict, too: it may check again before it fails, when the others show no
// wait any more.
// Messages that a Python signal handler might send are not considered. Ranks that share no memory see copies of the
// boards, which may be old; messages/wait_edge_exchange.hpp says why that is enough.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "liveness/wait_edge.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

// The ranks that a blocking call waits for: it cannot end without each of `ranks` (world ranks).
struct Awaited {
  OpKind op;
  uint64_t number;  // as in WaitEdge
  std::vector<int> ranks;
  size_t open_receives = 0;  // of large messages from that rank, pending beside the call, which nothing has matched
};

// The boards of all ranks of a world, and the part of the engine that knows whether a message is on its way.
class WaitForGraph {
 public:
  virtual ~WaitForGraph() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual WaitEdgeBoard* own_board() = 0;
  virtual const WaitEdgeBoard* board(int rank) const = 0;  // or the copy of it; null when there is none
  // Whether no message is unread or unwritten. Moves messages as far as possible first.
  virtual bool is_quiet() = 0;
  // For ranks that share no memory, see WaitEdgeExchange: subscribe to that rank's board; send the own board; send a
  // verdict to the members of a cycle.
  virtual void subscribe(int) {}
  virtual void publish() {}
  virtual void announce(const std::vector<WaitEdge>&) {}
  // The source line of this rank's running call of this kind; empty where it is not known.
  virtual std::string line_of_wait(OpKind) { return ""; }
};

// Watches one wait of a thread. Costs nothing before the wait is examined for the first time.
class DeadlockDetector {
 public:
  static constexpr int64_t kSuspiciousNs = 1'000'000'000;
  static constexpr int64_t kSuspiciousOfThreadsNs = 100'000'000;  // where ranks are threads: nothing is far away
  static constexpr double kShortSeconds = 10;

  DeadlockDetector(WaitForGraph& graph, double seconds, int64_t suspicious_ns)
      : graph_(graph), seconds_(seconds), suspicious_ns_(suspicious_ns) {}
  DeadlockDetector(const DeadlockDetector&) = delete;
  ~DeadlockDetector() { hide(); }

  // The deadlock that this wait is part of, if it is in one. `awaited` and `alone` are called now and then:
  // what is awaited (nothing: not only other ranks can end the wait, or something pending could end that of another
  // rank); whether only this thread could make calls.
  std::optional<Failure> examine(const std::function<std::optional<Awaited>()>& awaited,
                                 const std::function<bool()>& alone);
  // For a wait that has failed: the deadlock that a rank has found and that this wait was part of, at whatever time.
  // That one may have ended since, which is what the wait has failed for. Epochs only grow, and a rank shows one
  // wait at a time: what was found of an earlier call has an epoch below the first of this one.
  std::optional<Failure> announced() const;

 private:
  // Only where this wait was for one of `awaited`, unless that is null.
  std::optional<Failure> verdict_since(uint64_t epoch, const std::vector<int>* awaited = nullptr) const;
  bool is_suspicious();
  std::optional<Failure> look(const std::function<std::optional<Awaited>()>& awaited,
                              const std::function<bool()>& alone);
  WaitEdge choose(const Awaited& awaited) const;
  void show(const WaitEdge& wait, size_t open_receives);
  void hide();
  std::vector<WaitEdge> cycle_from(int rank) const;
  bool stands(const std::vector<WaitEdge>& cycle) const;
  Failure failure_of(std::vector<WaitEdge> cycle) const;

  WaitForGraph& graph_;
  const double seconds_;
  const int64_t suspicious_ns_;
  int64_t since_ns_ = 0;
  std::optional<WaitEdge> shown_;
  size_t shown_open_receives_ = 0;
  uint64_t first_epoch_ = 0;    // of this wait; 0 while it was never shown
  std::vector<WaitEdge> seen_;  // the cycle that the last look found
};

}  // namespace procgroup
