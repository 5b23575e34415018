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

// From which size of the largest piece on ordinary arrays are read where they lie, by the kernel. Arrays in arenas
// always are: no system call is needed.
//
// Where one rank only gives and another only takes, two copies through slots are faster than one by the kernel, because
// both ranks work, and because the second copy can go past the caches (16 MiB: broadcast 1.7 ms through slots, 2.6
// read; gather 2.5 and 3.3; reduce 1.1 and 2.7; and so on 4 ranks that share 2 cores: 3.2 and 5.2, 5.1 and 7.7, 3.6
// and 7.7). all_reduce and all_gather gain nothing at any size. Reads pay where the ranks have other work of the same
// length meanwhile, as a scatter's root with its own piece (4 MiB: 0.45 ms read, 0.58 through slots; 1 MiB: 0.19 and
// 0.09), or where much passes through the caches at once (16 MiB: all_to_all 4.6 read, 5.3 through slots;
// reduce_scatter 3.7, 6.0).
struct ReadingLimits {
  size_t scatter = size_t{2} << 20;
  size_t all_to_all = size_t{8} << 20;
  size_t reduce_scatter = size_t{12} << 20;
  size_t others = SIZE_MAX;

  static constexpr ReadingLimits all_from(size_t bytes) { return {bytes, bytes, bytes, bytes}; }
  bool takes(OpKind op, size_t bytes) const {
    switch (op) {
      case OpKind::kScatter:
        return bytes >= scatter;
      case OpKind::kAllToAll:
        return bytes >= all_to_all;
      case OpKind::kReduceScatter:
        return bytes >= reduce_scatter;
      default:
        return bytes >= others;
    }
  }
};

// When a rank copies so much into its outputs, it writes them past the caches, which cannot hold what all ranks give
// and get (third-level cache of 32 MiB, 2 ranks, 16 MiB: all_gather 5.5 ms through the caches, 4.3 past them; broadcast
// of arrays in arenas 1.75 and 1.4; but all_reduce of 4 MiB in arenas 0.19 and 0.36).
inline constexpr size_t kStreamedBytes = size_t{8} << 20;

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
  bool streams = false;              // whether the results of the call in hand are written past the caches
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
