// Exchange wait edges between ranks that share no memory: each keeps a copy of the others' boards, updated by messages.
//
//     message        contents                            from                                    to
//     subscribe      none                                a rank that waits, directly or not      the awaited rank
//     wait           the wait edge, the epoch that its   a rank that waits, at every change      its subscribers
//                    rank has confirmed
//     wait ended     none                                a rank whose wait has ended             its subscribers
//     verdict        a cycle of waits                    the rank that has found it              its other members
//     calls query    a group, and a call of it in a      a rank that has waited for long, or     a rank that has not
//                    CUDA graph, if any                  whose deadline is near or has come      joined that call
//     calls          a text that names the calls, and    that rank                               the querying rank
//                    whether a replay of that call runs
//     source line    a collective, and the line of the   a rank whose call is not that of the    all others
//                    program that made it                other ranks
//
// Messages between two ranks arrive in order. So a rank that sees a peer's wait has received all messages that the peer
// sent before it, and a confirmation stays true: a peer acts again only after the rank that it awaits has acted. Take a
// cycle in which each rank has confirmed the wait of its next one: the first to act would have received a message that
// was sent after that wait began, by a rank that had acted before it. So even an old copy proves a deadlock. (Whether
// pending receives may answer meanwhile: liveness/deadlock.hpp.)
//
// The caller of everything here but board() holds the mutex that guards Messages. Ranks are world ranks. One board for
// each peer is all that is kept of its messages, and a malformed message is ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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

  // Set-up: keep a copy of this peer's board, and return it.
  const WaitEdgeBoard* add(int peer);
  // Subscribe to that rank's wait; without effect for a rank that was not added.
  void subscribe(int peer);
  // Send the subscribers the changes of this rank's board.
  void publish(const WaitEdgeBoard& own);
  // Send the others of a cycle that it is one.
  void announce(const std::vector<WaitEdge>& cycle);

  // Query the pending calls of a rank, for an error message about this group. Without effect within kAgainNs of the
  // same query. `captured`: the number of a call in a CUDA graph, of whose replays the answer is to tell, too.
  void query_calls(int peer, uint64_t group, uint64_t captured = 0);
  // The answer to that query; until it comes, the one to the query before it if that is less than kFreshNs old.
  std::string calls(int peer) const;
  bool has_answered(int peer) const;
  // Whether a replay of the call `captured` runs on the peer's GPU; nothing where the peer has not said so.
  std::optional<bool> runs_replay(int peer) const;
  // Send a rank the source line of this rank's collective, and read what that rank has sent: the last one.
  void post_source_line(int peer, uint64_t group, uint64_t sequence, const std::string& line);
  std::string source_line(int peer, uint64_t group, uint64_t sequence) const;
  // Answer the pending queries, each rank's at most every kAnswerNs: a peer that reads nothing could query without end.
  bool has_queries() const { return queries_ != 0; }
  struct Answer {
    std::string calls;
    std::optional<bool> runs_replay{};
  };
  void answer(const std::function<Answer(uint64_t group, uint64_t captured)>& describe);

 private:
  static constexpr int64_t kAgainNs = 200'000'000;
  static constexpr int64_t kFreshNs = 1'000'000'000;
  static constexpr int64_t kAnswerNs = 50'000'000;
  static constexpr size_t kTextBytes = 480;

  struct Copy {
    WaitEdgeBoard board;
    bool subscribed = false;  // this rank to the peer, in its present wait
    bool subscriber = false;  // the peer to this rank
    uint64_t sent_epoch = 0;  // of the wait that was last sent to the peer; 0 when none, or after `wait ended`
    uint64_t sent_confirmed = 0;
    int64_t queried_ns = 0;  // when this rank queried the peer's calls
    uint64_t queried_group = 0;
    uint64_t queried_captured = 0;
    bool answered = false;     // by the peer, since then
    std::string calls;         // the peer's last answer,
    uint64_t calls_group = 0;  // for which group that was,
    int64_t calls_ns = 0;      // and when it came
    std::optional<bool> runs_replay;
    std::optional<std::pair<uint64_t, uint64_t>> query;  // of the peer, until it is answered: group and captured call
    int64_t answered_ns = 0;
    uint64_t line_group = 0;  // of the peer's source line
    uint64_t line_sequence = 0;
    std::string line;
  };
  struct Header;
  struct Wait;

  // Null for ranks that share memory.
  Copy* copy_of(int peer) const { return copies_[static_cast<size_t>(peer)].get(); }
  void post(int peer, const Header& header, std::span<const std::byte> content);
  void take(int peer, const std::vector<std::byte>& message);
  void post_text(int peer, Header header, const std::string& text);
  void take_text(Copy& copy, const Header& header, const std::vector<std::byte>& message);

  Messages& messages_;
  const int rank_;
  std::vector<std::unique_ptr<Copy>> copies_;  // by rank
  int queries_ = 0;                            // unanswered ones of all peers
};

}  // namespace procgroup
