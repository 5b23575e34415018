// Announcements between hosts. The leader of each host sends what the ranks of its host announce to the leaders of the
// other hosts, and writes theirs into memory of its own host that represents the members elsewhere: their *proxies*. So
// every rank reads the announcements, descriptors and small data of all members in memory, wherever they run, and
// finishes its calls by the same code.
//
//     host 0                                                      host 1
//     rank 0 (leader)  announcement ──┐   message: an entry   ┌──> proxies of ranks 0, 1  <── read by ranks 2, 3
//     rank 1           announcement ──┴── for each rank ──────┘
//     proxies of ranks 2, 3        <────────────────────────────── rank 2 (leader), rank 3
//
// An *entry* is one rank's announcement:
//
//     +------+-------+------------+----------------------------+- - - - - - - - - - - - - - - - - - -+
//     | rank | bytes | Descriptor | all_to_all: counts, 2 x p  | small elements for that host's ranks |
//     +------+-------+------------+----------------------------+- - - - - - - - - - - - - - - - - - -+
//
// The counts are those of the rank's input blocks, then of its output blocks, by rank: every rank compares every pair,
// and all find the same first pair that differs. Which elements an entry has follows from the descriptor (all_to_all:
// from the counts), so ranks that agree on one agree on the other.
//
// A leader that makes another call than a rank of its host cannot know which elements those are, and sends none.
//
// A leader waits for the ranks of its host for some milliseconds, so that one message has all entries; then it sends
// those that it has, so that the others know exactly which ranks are missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/state.hpp"
#include "ops/request.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

// The layout of a group's proxies in the arena of a leader. Their small areas are not there: in the calls that have
// some, they follow the leader's own, in its staging block.
class Proxies {
 public:
  static size_t bytes(const Topology& topology) {
    return topology.represented() * stride(static_cast<size_t>(topology.size()));
  }
  // Set the state's views of all members of other hosts to their proxies, from `offset` on in the leader's arena.
  // Throws std::out_of_range when that is outside of the arena.
  static void attach(CollectiveState& state, const Arena& arena, uint64_t offset);

 private:
  static size_t stride(size_t group_size) { return round_up(GroupLayout::memory_bytes(group_size), kArenaLine); }
};

// Of another rank than the leader: attach the proxies once its leader has made them.
void attach_proxies(CollectiveState& state);

// Of a leader. Used under the mutex that guards Messages.
class Relay {
 public:
  explicit Relay(const CollectiveState& state);
  Relay(const Relay&) = delete;
  ~Relay();

  // Begin the exchange for a call that this rank has announced.
  void start(CollectiveState& state, uint64_t sequence);
  // Send and receive as far as possible; return whether anything moved. The request outlives the exchange.
  bool advance(CollectiveState& state, const Request& request);
  // The failure that ended the exchange, with group ranks.
  const std::optional<Failure>& failure() const { return failure_; }
  // Whether everything of this call has been sent and received.
  bool is_completed() const { return unsent_ == 0 && unannounced_ == 0; }
  // Whether this rank itself can go on with this call now: begin its exchange, send what ranks of its host have
  // announced, or take what has arrived. Another thread may be about to.
  bool has_work(const CollectiveState& state, uint64_t sequence) const;
  // Cancel transfers that still run.
  void cancel(CollectiveState& state);

 private:
  // Another host: the receive that runs for it, and into what.
  struct Host {
    std::unique_ptr<std::byte[]> buffer;
    std::shared_ptr<Transfer> receive;
    size_t unannounced = 0;  // ranks
  };

  bool forward(CollectiveState& state, const Request& request);
  bool collect(CollectiveState& state, const Request& request);
  void post_receive(CollectiveState& state, int host);
  void take(CollectiveState& state, const Request& request, int host, std::span<const std::byte> message);
  void take_entry(CollectiveState& state, const Request& request, int rank, std::span<const std::byte> entry);
  bool take_elements(CollectiveState& state, const Request& request, int rank, std::span<const std::byte> elements);
  void check_elements(CollectiveState& state, const Request& request);

  const size_t capacity_;  // of a message, in bytes
  std::vector<Host> hosts_;
  std::vector<uint64_t> small_;  // by group rank: distance of a proxy's small areas from this rank's own
  uint64_t sequence_ = 0;        // of the call that was begun last
  std::vector<bool> sent_;       // by place on this host
  size_t unsent_ = 0;
  size_t unannounced_ = 0;
  int without_elements_ = -1;  // a rank whose entry has none, though it agrees with this rank's call
  int64_t since_ns_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
