// What the collectives of one group through shared memory have in common. One call runs at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algorithms/plan.hpp"
#include "engine/peer_memory.hpp"
#include "engine/staging.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {

// Between which sizes of a rank's largest contribution ordinary arrays are read where they lie. Arrays in arenas always
// are: no system call is needed.
struct ReadingLimits {
  size_t from = size_t{64} << 10;
  // Above this, two copies through slots cost 1.6 to 4.3 times what a read costs, except in front of a reduction whose
  // result stays where it is made: there the read's elements go through memory once more (64 MiB: reduce 13.5 ms by
  // reads, 7.7 through slots; broadcast 7.5 and 25.3; all_reduce 13.6 and 30.5).
  size_t far_above_caches = size_t{48} << 20;

  bool takes(OpKind op, size_t bytes) const {
    if (op == OpKind::kAllReduce) return bytes >= far_above_caches;
    if (op == OpKind::kReduce || op == OpKind::kReduceScatter) return bytes >= from && bytes < far_above_caches;
    return bytes >= from;
  }
};

struct SharedState {
  int rank;
  GroupLayout layout;
  std::vector<GroupMemoryView> members;     // by group rank
  const std::vector<const Arena*>* arenas;  // by group rank; to wake sleepers
  std::unique_ptr<Staging> staging;         // this rank's
  uint64_t progress = 0;                    // what every rank had published when the last call ended
  uint64_t chunks = 0;                      // of all calls that ended
  Plan plan{};                              // reused from call to call, as are the next two
  PieceTable pieces{};
  std::vector<const void*> sources;        // scratch for reduce
  size_t direct_bytes;                     // all_reduce above two ranks is direct up to here
  size_t exchanged_bytes;                  // all_reduce of two ranks is exchanged from here on
  std::vector<const PeerMemory*> peers{};  // by group rank; null for this rank
  bool reads_everything = false;           // whether this rank can read any array of any peer
  ReadingLimits reading{};
  std::vector<std::byte> scratch{};  // for arrays that are read and then combined

  int size() const { return static_cast<int>(members.size()); }
  GroupMemoryView& mine() { return members[static_cast<size_t>(rank)]; }
  const GroupMemoryView& member(int peer) const { return members[static_cast<size_t>(peer)]; }
  bool has_announced(int peer, uint64_t sequence) const {
    return member(peer).line(sequence).sequence.load(std::memory_order_seq_cst) == sequence;
  }
  void wake_peers() const;
};

}  // namespace procgroup
