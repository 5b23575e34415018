// The state that the collectives of one group share on this rank. One call runs at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/processor.hpp"
#include "collectives/group_view.hpp"
#include "collectives/pair_counts.hpp"
#include "collectives/staging.hpp"
#include "messages/messages.hpp"
#include "schedules/schedule.hpp"
#include "schedules/topology.hpp"
#include "transport/group_memory.hpp"
#include "transport/peer_memory.hpp"

namespace procgroup {

// Sizes in bytes: at least `from`, and less than `to`.
struct SizeRange {
  size_t from = SIZE_MAX;
  size_t to = SIZE_MAX;

  bool has(size_t bytes) const { return bytes >= from && bytes < to; }
};

// The sizes of the largest block for which the kernel reads ordinary arrays in place. Arrays in arenas are
// always read in place, without a system call. Measured on 2 ranks, in us, through slots and read.
class ReadingRanges {
 public:
  // Where the kernel's copies are fast, one copy beats two as long as all fits in the caches; above, both copies count
  // less than that results through slots can go past the caches. More ranks write more (all_gather of 2 ranks, 16 MiB:
  // 3.2 ms and 2.4; 32 MiB: 6.3 and 6.6; of 4 ranks, 8 MiB: 5.5 and 6.6).
  static constexpr ReadingRanges with_fast_string_copies(size_t ranks = 2) {
    constexpr size_t kKilobyte = 1024;
    constexpr size_t kMegabyte = 1024 * kKilobyte;
    ReadingRanges ranges = none();
    ranges.set(OpKind::kBroadcast, {128 * kKilobyte, 4 * kMegabyte});
    ranges.set(OpKind::kAllGather, {64 * kKilobyte, (ranks == 2 ? 28 : 8) * kMegabyte});
    ranges.set(OpKind::kScatter, {32 * kKilobyte});
    ranges.set_by_pair({64 * kKilobyte});
    ranges.set(OpKind::kReduceScatter, {128 * kKilobyte});
    return ranges;
  }
  // Elsewhere two copies are faster than one by the kernel where one rank only gives and another only takes, because
  // both ranks work (Zen 3, 16 MiB: broadcast 1.7 ms and 2.6; gather 2.5 and 3.3; reduce 1.1 and 2.7; and so on 4 ranks
  // that share 2 cores). all_reduce and all_gather gain nothing at any size. Reads pay where the ranks have other work
  // of the same length meanwhile, as a scatter's root with its own block (4 MiB: 0.58 and 0.45; 1 MiB: 0.09 and 0.19),
  // or where much passes through the caches at once (16 MiB: all_to_all 5.3 and 4.6; reduce_scatter 6.0 and 3.7).
  static constexpr ReadingRanges with_slow_string_copies() {
    constexpr size_t kMegabyte = size_t{1} << 20;
    ReadingRanges ranges = none();
    ranges.set(OpKind::kScatter, {2 * kMegabyte});
    ranges.set_by_pair({8 * kMegabyte});
    ranges.set(OpKind::kReduceScatter, {12 * kMegabyte});
    return ranges;
  }
  static ReadingRanges for_this_processor(size_t ranks = 2) {
    return has_fast_string_copies() ? with_fast_string_copies(ranks) : with_slow_string_copies();
  }
  static constexpr ReadingRanges all(SizeRange range) {
    ReadingRanges ranges;
    ranges.by_op_.fill(range);
    return ranges;
  }

  // Written out: g++ 12 with sanitizers gives zeros for default values in a temporary that it makes a constant.
  static constexpr ReadingRanges none() { return all({SIZE_MAX, SIZE_MAX}); }

  constexpr const SizeRange& of(OpKind op) const { return by_op_[static_cast<size_t>(op)]; }

 private:
  constexpr void set(OpKind op, SizeRange range) { by_op_[static_cast<size_t>(op)] = range; }
  constexpr void set_by_pair(SizeRange range) {
    for (size_t op = 0; op < kOperations; ++op)
      if (is_by_pair(static_cast<OpKind>(op))) by_op_[op] = range;
  }

  std::array<SizeRange, kOperations> by_op_{};
};

// When a rank copies so much into its outputs, it writes them past the caches, which cannot hold what all ranks give
// and get (third-level cache of 32 MiB, 2 ranks, 16 MiB: all_gather 5.5 ms through the caches, 4.3 past them; broadcast
// of arrays in arenas 1.75 and 1.4; but all_reduce of 4 MiB in arenas 0.19 and 0.36).
inline constexpr size_t kStreamedBytes = size_t{8} << 20;

// Above two ranks, all_reduce of up to this many bytes lets every rank reduce everything.
inline constexpr size_t kDirectBytes = 64 * 1024;

// Bytes that a rank reads from a peer's array at a time; after each read it checks that the array was still exposed.
// What a rank has written leaves its second-level cache before a chunk ends: the peer reads it faster from the third
// level (all_reduce of 4 MiB in arenas on 2 ranks: 312 us; 390 in chunks of 1 MiB).
inline constexpr size_t kReadInPlaceBytes = size_t{4} << 20;

// The schedule of the last call that was not small, for tests.
struct ChosenSchedule {
  uint64_t sequence = 0;  // of that call
  const char* name = "";
};

// Slots that this rank wrote, one bit each.
struct CopiedSlots {
  uint32_t before = 0;  // in the previous call, while others may still read them
  uint32_t now = 0;     // in the current call
};

// Limits of messages between hosts; equal on all ranks of a group.
struct MessageLimits {
  size_t small_bytes = 4 * 1024;  // of a rank's elements that are sent with its announcement
  size_t segment_bytes = 256 * 1024;
};

// How the calls of a group that spans hosts exchange messages.
struct GroupMessages {
  Messages& messages;
  std::mutex& mutex;           // guards Messages
  std::function<bool()> pump;  // under that mutex; whether anything moved
  GroupView group;
  MessageLimits limits{};

  // Announcements have one key for all calls of the group, so that ranks whose calls are out of step compare them
  // instead of waiting for each other.
  MessageKey announcement_key() const { return {group.id, kEngineTag}; }
  // Messages of different calls never meet.
  MessageKey data_key(uint64_t sequence) const { return key_of(sequence, 1); }
  MessageKey confirmation_key(uint64_t sequence) const { return key_of(sequence, 2); }

 private:
  MessageKey key_of(uint64_t sequence, uint64_t kind) const {
    return {group.id, kEngineTag | (sequence << 2 & ~kEngineTag) | kind};
  }
  static constexpr uint64_t kEngineTag = uint64_t{1} << 63;  // users' tags do not have this bit
};

class Relay;

// Memory of a schedule's own, kept from call to call.
class Scratch {
 public:
  std::byte* reserve(size_t bytes) {
    if (bytes > bytes_) {
      memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = bytes;
    }
    return memory_.get();
  }
  std::byte* data() const { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
};

struct CollectiveState {
  int rank;
  GroupLayout layout;
  // By group rank. Members on other hosts have memory here too, in the arena of this host's leader, which writes there
  // what they announce (collectives/relay.hpp); null until the leader has made it.
  std::vector<GroupMemoryView> members;
  const std::vector<const Arena*>* arenas;  // by group rank, null for other hosts; to wake sleepers
  std::unique_ptr<Staging> staging;         // this rank's
  uint64_t progress = 0;                    // of every rank of this host when the last call ended
  uint64_t chunks = 0;                      // of all calls that ended
  Schedule schedule{};                      // reused from call to call, as are the next three
  BlockTable blocks{};
  PairCounts counts{};                     // all_to_all: once all have announced the call
  std::vector<const void*> sources;        // for reduce
  size_t direct_bytes;                     // all_reduce above two ranks is direct up to here
  size_t exchanged_bytes;                  // all_reduce of two ranks is exchanged from here on
  std::vector<const PeerMemory*> peers{};  // by group rank; null for this rank and for other hosts
  bool reads_everything = false;           // whether this rank can read any array of any peer
  ReadingRanges reading;
  ReadableArrays readable{};
  CopiedSlots copied_in{};
  uint64_t finished = 0;          // see transport/group_memory.hpp; by this rank
  uint64_t finished_by_all = 0;   // as far as this rank has looked
  std::vector<uint64_t> equal{};  // by group rank: the last call up to which its calls are known to be this rank's
  ChosenSchedule chosen{};
  bool streams = false;              // whether the results of the current call are written past the caches
  std::vector<std::byte> scratch{};  // for arrays that are read and then combined
  const std::vector<int>* global_ranks = nullptr;  // for texts, see rank_name
  Topology topology;
  std::optional<GroupMessages> messages{};  // where the group spans hosts, as are the next three
  std::shared_ptr<Relay> relay{};           // of this host's leader
  Scratch message_scratch{};
  // Called with the cause before a call that fails gives its messages up, so that the other hosts learn the cause
  // first. It adds to a timeout the leaders that may not have relayed announcements.
  std::function<void(Failure&, const Descriptor&)> on_failure{};
  // The members that a timeout names when another backend does not say for whom it waits; see Watch::stopped_members.
  std::function<std::vector<int>()> stopped_members{};

  int size() const { return static_cast<int>(members.size()); }
  GroupMemoryView& mine() { return members[static_cast<size_t>(rank)]; }
  const GroupMemoryView& member(int peer) const { return members[static_cast<size_t>(peer)]; }
  // A member of this host, by its place there.
  const GroupMemoryView& local(int index) const {
    return topology.spans_hosts() ? member(topology.local_ranks()[static_cast<size_t>(index)]) : member(index);
  }
  int local_size() const { return static_cast<int>(topology.local_ranks().size()); }
  bool has_announced(int peer, uint64_t sequence) const {
    const GroupMemoryView& view = member(peer);
    return view && view.announcement(sequence).sequence.load(std::memory_order_seq_cst) == sequence;
  }
  // Of a call that both ranks have announced.
  bool differs(int peer, uint64_t sequence) const {
    return member(peer).announcement(sequence).fingerprint != member(rank).announcement(sequence).fingerprint;
  }
  // The first call up to `sequence`, which `peer` has announced, in which it differs from this rank; 0: none.
  uint64_t find_difference(int peer, uint64_t sequence) {
    if (topology.spans_hosts()) return differs(peer, sequence) ? sequence : 0;
    equal.resize(members.size());
    uint64_t& known = equal[static_cast<size_t>(peer)];
    for (known = std::max(known, finished); known < sequence; ++known)
      if (differs(peer, known + 1)) return known + 1;
    return 0;
  }
  void finish(uint64_t sequence) {
    finished = sequence;
    mine().memory().finished.store(sequence, std::memory_order_release);
  }
  // Before this rank waits, where peers may wait for it to finish calls.
  void show_finished() {
    mine().memory().finished.store(finished, std::memory_order_seq_cst);
    wake_peers();
  }
  uint64_t finished_by(int peer) const { return member(peer).memory().finished.load(std::memory_order_seq_cst); }
  void wake_peers() const {
    for (int peer = 0; peer < size(); ++peer) {
      const Arena* arena = (*arenas)[static_cast<size_t>(peer)];
      if (peer == rank || arena == nullptr) continue;
      // Pairs with the sleeper's increment, which comes before its last look at our flags: either it sees the
      // flag that was written before this load, or this load sees it asleep.
      if (arena->header().sleepers.load(std::memory_order_seq_cst) != 0) arena->wake();
    }
  }
};

}  // namespace procgroup
