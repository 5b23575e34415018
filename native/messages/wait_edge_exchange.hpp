// Shows the waits of ranks that share no memory with this one: small messages keep a copy of their boards here.
//
//     asks      tell me what you are in     from a rank that waits for me, or for one that waits for me, and so on
//     shows     my wait and whose I have confirmed, or that it is over; to those who have asked, when it changes
//     verdict   the cycle that I have found                                           to its other members
//     asks for calls    which calls are you in?         from a rank whose call has reached its deadline without me
//     calls             those that I am in, in words    to that rank
//
// Messages between two ranks arrive in order. So whoever sees a peer's wait has everything that the peer sent before
// it, and what it confirms stays true: a peer acts again only after its own next one has. Take a cycle in which each
// has confirmed the wait that the next one is in: the first to act would have got a message that was sent after that
// wait began, by somebody who had acted before it. So a copy may be old, and the cycle is still a deadlock.
//
// Everything here but board() happens under the mutex that guards Messages. Ranks are world ranks. Nothing is kept of
// what peers send but one board for each, and what makes no sense is ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "liveness/wait_edge.hpp"
#include "messages/messages.hpp"

namespace procgroup {

class WaitEdgeExchange {
 public:
  WaitEdgeExchange(Messages& messages, int rank, int world_size);
  WaitEdgeExchange(const WaitEdgeExchange&) = delete;
  ~WaitEdgeExchange();

  // Set-up: keep a copy of this peer's board; where it lies.
  const WaitEdgeBoard* add(int peer);
  // Let that rank tell what it shows; nothing for a rank that was not added.
  void ask(int peer);
  // Tell those who have asked what has changed on this rank's board.
  void publish(const WaitEdgeBoard& own);
  void announce(const std::vector<WaitEdge>& cycle);

  // Ask a rank which calls it is in, for a reader who waits in this group. Without effect within kFreshNs of the same
  // question. The answer, in words, when there is one.
  void ask_calls(int peer, uint64_t group);
  const std::string& calls(int peer) const;
  // Answer those who have asked, each at most every kAnswerNs: a peer that reads nothing could ask without end.
  bool is_asked() const { return questions_ != 0; }
  void answer(const std::function<std::string(uint64_t group)>& describe);

 private:
  static constexpr int64_t kFreshNs = 1'000'000'000;
  static constexpr int64_t kAnswerNs = 50'000'000;
  static constexpr size_t kCallsBytes = 240;

  struct Copy {
    WaitEdgeBoard board;
    bool asked = false;       // by this rank, in its present wait
    bool asks = false;        // that rank
    uint64_t told_epoch = 0;  // to that rank, and not yet that it is over; 0 when nothing is
    uint64_t told_confirmed = 0;
    int64_t asked_ns = 0;  // when this rank asked for its calls
    uint64_t asked_group = 0;
    std::string calls;                 // its answer
    std::optional<uint64_t> question;  // the group of that rank's question, which is not answered yet
    int64_t answered_ns = 0;
  };
  struct Head;
  struct Wait;

  void post(int peer, const Head& head, const std::vector<Wait>& waits);
  void take(int peer, const std::vector<std::byte>& message);
  void take_text(Copy& copy, const Head& head, const std::vector<std::byte>& message);

  Messages& messages_;
  const int rank_;
  std::vector<std::unique_ptr<Copy>> copies_;  // by rank; null for those that share memory
  int questions_ = 0;                          // that wait for an answer
};

}  // namespace procgroup
