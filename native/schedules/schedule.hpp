// What a large collective does on one rank, as data: a list of steps over the links between the ranks.
//
// Vocabulary. An array is handled in *chunks*. Ranks of one host share memory: a rank *copies in* a chunk in one of its
// own *slots* and *publishes*: its progress counter rises to a value. Others *await* that value, then reduce or copy
// out the content of the slot. Values count from the start of the call. Ranks of different hosts *send* and *receive*
// messages; elements to be reduced are received in *scratch*, private memory of this rank.
//
// Steps start in order. Sends and receives then run on by themselves; a later step waits until no running transfer
// writes memory that the step touches, or reads memory that the step writes. Both ends of a message issue it at the
// same place of one order, and a step waits only for steps before it: so no schedule deadlocks.
//
// Ranks in steps and places are those of the schedule's own numbering: slots, publish and await number the ranks of
// this host; send and receive number the ranks of the group. Where all ranks share memory both are the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/operations.hpp"
#include "schedules/topology.hpp"

namespace procgroup {

inline constexpr int kEveryone = -1;

// A range of bytes that a step reads or writes.
struct Place {
  // kPeerInput and kPeerOutput are another rank's array, read in place: of blocks, the one that is for this rank.
  enum class Kind : uint8_t { kInput, kOutput, kSlot, kPeerInput, kPeerOutput, kScratch };
  Kind kind = Kind::kInput;
  int8_t slot = 0;  // kSlot
  // kInput, kOutput: the block, in calls with one per rank; kScratch: the source; else: the owner of the memory.
  int32_t rank = 0;
  size_t offset = 0;  // in bytes
};

// A reduction in one step, or one of two: of elements to partial results (see dtype/partial.hpp), and of partial
// results to elements.
enum class Stage : uint8_t { kWhole, kToPartial, kFromPartial };

struct Step {
  enum class Kind : uint8_t {
    kCopy,        // from -> to
    kReduce,      // source 0 op source 1 op ... -> to: source i is `from` with rank i; source own_source is `own`
    kRead,        // from a peer's array -> to
    kReadReduce,  // as kReduce, but `from` is the peers' arrays
    kPublish,     // my progress := value
    kAwait,       // until progress of `rank` (or of kEveryone) >= value
    kSend,        // from -> rank
    kReceive,     // rank -> to
  };
  Kind kind;
  int32_t rank = 0;
  int32_t sources = 0;     // kReduce, kReadReduce
  int32_t own_source = 0;  // kReduce, kReadReduce
  uint64_t value = 0;
  size_t bytes = 0;
  Place to{};
  Place from{};
  Place own{};   // kReduce
  Place also{};  // kReduce: where the result goes too, when has_also
  bool has_also = false;
  Stage stage = Stage::kWhole;  // kReduce
};

struct Schedule {
  std::vector<Step> steps;
  uint64_t published = 0;    // the last value that every rank publishes in this call
  uint64_t chunks = 0;       // slots that this call uses, in turn
  size_t scratch_bytes = 0;  // of each call
  size_t source_stride = 0;  // from one source to the next in scratch
  size_t widening = 1;       // bytes of a partial result for each byte of an element

  // Keeps the memory of the steps.
  void clear() {
    steps.clear();
    *this = {.steps = std::move(steps)};
  }

  // Bytes that a step writes, and that it reads of each source. Those of a reduction are counted in elements.
  size_t written_bytes(const Step& step) const {
    return step.stage == Stage::kToPartial ? step.bytes * widening : step.bytes;
  }
  size_t read_bytes(const Step& step) const {
    return step.stage == Stage::kFromPartial ? step.bytes * widening : step.bytes;
  }
};

// Bytes of an array, from its beginning.
struct Range {
  size_t offset = 0;
  size_t bytes = 0;
};

// The block of an array that belongs to `owner` of `owners`: whole elements, the first owners have one more.
constexpr Range block_of(size_t bytes, size_t element_bytes, int owners, int owner) {
  const size_t elements = bytes / element_bytes;
  const size_t parts = static_cast<size_t>(owners);
  const size_t index = static_cast<size_t>(owner);
  const size_t begin = elements / parts * index + (index < elements % parts ? index : elements % parts);
  const size_t count = elements / parts + (index < elements % parts ? 1 : 0);
  return {begin * element_bytes, count * element_bytes};
}

// How much each rank has for each other, in bytes.
class BlockTable {
 public:
  void reset(int size, size_t bytes) {
    size_ = static_cast<size_t>(size);
    bytes_.assign(size_ * size_, bytes);
  }
  size_t& between(int from, int to) { return bytes_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)]; }
  size_t between(int from, int to) const { return bytes_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)]; }
  size_t largest() const { return bytes_.empty() ? 0 : *std::ranges::max_element(bytes_); }
  // Without what ranks keep themselves: of all blocks, and of those that `rank` gives or gets.
  size_t largest_moved() const {
    size_t largest = 0;
    for (int rank = 0; rank < static_cast<int>(size_); ++rank) largest = std::max(largest, largest_moved(rank));
    return largest;
  }
  size_t largest_moved(int rank) const {
    size_t largest = 0;
    for (int peer = 0; peer < static_cast<int>(size_); ++peer)
      if (peer != rank) largest = std::max({largest, between(rank, peer), between(peer, rank)});
    return largest;
  }

 private:
  size_t size_ = 0;
  std::vector<size_t> bytes_;
};
inline const BlockTable kNoBlocks;
inline const Topology kEveryRankAlone;

// What a schedule is made for. Sizes are in bytes, and multiples of `element_bytes`.
struct ScheduleRequest {
  OpKind op = OpKind::kBarrier;
  int rank = 0;  // in the group
  int size = 1;
  int root = -1;
  size_t element_bytes = 1;
  size_t bytes = 0;                      // of the array, in operations without blocks
  const BlockTable& blocks = kNoBlocks;  // equal for all pairs in operations without blocks
  size_t chunk_bytes = 0;                // at most a slot; of arrays outside of slots: how much is read at a time
  size_t segment_bytes = 0;              // of a message
  // Chunks of all earlier calls: slots are used in turn from call to call. A slot that a peer has just read
  // is the slowest to write again, because its lines are still in the peer's first-level cache (measured:
  // 64 KiB in 13.4 us with one slot, 7.4 us with two in turn).
  uint64_t earlier_chunks = 0;
  size_t widening = 1;                         // bytes of a partial result for each byte of an element
  const Topology& topology = kEveryRankAlone;  // of groups that span hosts

  // What one rank has for another: with a root, only what it gives or takes.
  size_t between(int from, int to) const {
    return gives(op, from, root) && takes(op, to, root) ? blocks.between(from, to) : 0;
  }
};

// The schedules, each kind in a file of its own, which explains it.

// Through slots: of blocks (gather, all_gather, scatter, reduce_scatter, all_to_all), and of whole arrays. For
// all_reduce also in two other forms: as reduce-scatter and all-gather, and for 2 ranks, whose chunks may be twice as
// long as a slot, because each slot takes half of one.
void schedule_blocks(const ScheduleRequest& request, Schedule& schedule);
void schedule_slots(const ScheduleRequest& request, Schedule& schedule);
void schedule_all_reduce_scattered(const ScheduleRequest& request, Schedule& schedule);
void schedule_all_reduce_exchanged(const ScheduleRequest& request, Schedule& schedule);
// Of arrays that the ranks read in place.
void schedule_reading(const ScheduleRequest& request, Schedule& schedule);
// By messages alone. Whatever the op, the input, or this rank's input block, may be the output, or its output block.
void schedule_messages(const ScheduleRequest& request, Schedule& schedule);
// Shared memory inside a host, messages between hosts.
bool has_hierarchical_schedule(OpKind op);
void schedule_hierarchical(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
