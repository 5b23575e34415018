// Schedules through slots for collectives in which ranks have blocks for each other. Blocks may be of different sizes,
// empty, and anywhere in memory.
//
// Vocabulary, beside that of schedule.hpp. A *round* moves the next part of every block. Where a rank has a different
// block for each other rank, its slot is divided into *lanes*, one per receiver, and a part is at most a lane.
#include <algorithm>

#include "schedules/schedule_writer.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {
namespace {

constexpr size_t kCacheLine = 64;

// Writes steps in the words of the essay above.
class BlockScheduleBuilder : public ScheduleWriter {
 public:
  // `largest`: how much all rounds together move at most between two ranks.
  BlockScheduleBuilder(const ScheduleRequest& request, Schedule& schedule, int lanes, size_t largest)
      : ScheduleWriter(request, schedule), part_(lane_bytes(lanes)) {
    schedule_.chunks = rounds_for(largest);
  }
  BlockScheduleBuilder(const ScheduleRequest& request, Schedule& schedule, int lanes)
      : BlockScheduleBuilder(request, schedule, lanes, request.blocks.largest()) {}

  uint64_t rounds() const { return schedule_.chunks; }
  uint64_t rounds_for(size_t bytes) const { return parts_of(bytes, part_); }
  // The part of the block between two ranks that one round moves; none when the block is shorter.
  size_t length(uint64_t round, int from, int to) const {
    return part_of(request_.blocks.between(from, to), round, part_).bytes;
  }
  Place input(uint64_t round, int block = 0) const { return procgroup::input(round * part_, block); }
  Place output(uint64_t round, int block = 0) const { return procgroup::output(round * part_, block); }
  Place slot(uint64_t round, int rank, int lane = 0) const {
    return in_slot((request_.earlier_chunks + round) % kSlots, rank, static_cast<size_t>(lane) * part_);
  }
  // My own block goes from input to output, whole.
  void keep_own(int input_block, int output_block) {
    copy(output(0, output_block), input(0, input_block), request_.blocks.between(request_.rank, request_.rank));
  }

 private:
  size_t lane_bytes(int lanes) const {
    const size_t room = request_.chunk_bytes / static_cast<size_t>(lanes);
    return room >= kCacheLine ? room / kCacheLine * kCacheLine : whole_elements(room);
  }

  const size_t part_;
};

// Which lane of `owner`'s slot is for `reader`: the next rank's is the first.
int lane_for(int reader, int owner, int size) { return (reader - owner - 1 + size) % size; }

int lanes_for_others(int size) { return std::max(size - 1, 1); }

// CopyIn k overwrites round k-4 (four slots): everybody has published k, and so is done with round k-2.
void schedule_all_gather(const ScheduleRequest& request, Schedule& schedule) {
  BlockScheduleBuilder builder(request, schedule, 1);
  for (uint64_t round = 0; round < builder.rounds(); ++round) {
    const size_t own = builder.length(round, request.rank, request.rank);
    builder.copy(builder.slot(round, request.rank), builder.input(round), own);
    builder.publish(round + 1);
    builder.copy(builder.output(round, request.rank), builder.input(round), own);
    builder.for_each_peer([&](int peer) {
      builder.await(peer, round + 1);
      builder.copy(builder.output(round, peer), builder.slot(round, peer), builder.length(round, peer, request.rank));
    });
  }
}

// gather, scatter. A sender publishes k+1 when round k is in its slot, a receiver when it has copied out its part of
// round k. Before a sender overwrites round k-4 it awaits value k-3 of those that receive it.
void schedule_rooted(const ScheduleRequest& request, Schedule& schedule) {
  const bool has_lanes = has_input_blocks(request.op);  // the root's blocks are for different ranks
  BlockScheduleBuilder builder(request, schedule, has_lanes ? lanes_for_others(request.size) : 1);
  const bool is_root = request.rank == request.root;
  const bool sends = is_root == has_lanes;
  const auto lane = [&](int reader, int owner) { return has_lanes ? lane_for(reader, owner, request.size) : 0; };
  if (is_root) builder.keep_own(has_lanes ? request.rank : 0, has_lanes ? 0 : request.rank);
  for (uint64_t round = 0; round < builder.rounds(); ++round) {
    if (sends && round >= kSlots) builder.await(is_root ? kEveryone : request.root, round - kSlots + 1);
    builder.for_each_peer([&](int peer) {
      if (!is_root && peer != request.root) return;
      if (sends)
        return builder.copy(builder.slot(round, request.rank, lane(peer, request.rank)),
                            builder.input(round, has_lanes ? peer : 0), builder.length(round, request.rank, peer));
      builder.await(peer, round + 1);
      builder.copy(builder.output(round, has_lanes ? 0 : peer), builder.slot(round, peer, lane(request.rank, peer)),
                   builder.length(round, peer, request.rank));
    });
    builder.publish(round + 1);
  }
}

// Slots are overwritten as in all_gather. All sources of a reduction are at the same offset in their slots: with more
// than two ranks, lanes are numbered by receiver, and a rank leaves its own lane empty.
void schedule_reduce_scatter(const ScheduleRequest& request, Schedule& schedule) {
  BlockScheduleBuilder builder(request, schedule, request.size == 2 ? 1 : request.size);
  const auto lane = [&](int reader) { return request.size == 2 ? 0 : reader; };
  for (uint64_t round = 0; round < builder.rounds(); ++round) {
    builder.for_each_peer([&](int peer) {
      builder.copy(builder.slot(round, request.rank, lane(peer)), builder.input(round, peer),
                   builder.length(round, request.rank, peer));
    });
    builder.publish(round + 1);
    builder.await(kEveryone, round + 1);
    builder.reduce(builder.output(round), builder.slot(round, request.rank, lane(request.rank)),
                   builder.input(round, request.rank), builder.length(round, request.rank, request.rank));
  }
}

// Slots are overwritten as in all_gather: a rank awaits everybody in every round up to the last in which it gives or
// gets anything. Then it publishes all rounds at once, since it neither writes nor reads a slot in the rest of them: so
// its schedule is as long as its own blocks, however much the others say that they move.
void schedule_all_to_all(const ScheduleRequest& request, Schedule& schedule) {
  BlockScheduleBuilder builder(request, schedule, lanes_for_others(request.size), request.blocks.largest_moved());
  builder.keep_own(request.rank, request.rank);
  const uint64_t own_rounds = builder.rounds_for(request.blocks.largest_moved(request.rank));
  for (uint64_t round = 0; round < own_rounds; ++round) {
    builder.for_each_peer([&](int peer) {
      builder.copy(builder.slot(round, request.rank, lane_for(peer, request.rank, request.size)),
                   builder.input(round, peer), builder.length(round, request.rank, peer));
    });
    builder.publish(round + 1);
    builder.for_each_peer([&](int peer) {
      builder.await(peer, round + 1);
      builder.copy(builder.output(round, peer), builder.slot(round, peer, lane_for(request.rank, peer, request.size)),
                   builder.length(round, peer, request.rank));
    });
  }
  if (own_rounds < builder.rounds()) builder.publish(builder.rounds());
}

}  // namespace

void schedule_blocks(const ScheduleRequest& request, Schedule& schedule) {
  if (is_by_pair(request.op)) return schedule_all_to_all(request, schedule);
  switch (request.op) {
    case OpKind::kGather:
    case OpKind::kScatter:
      return schedule_rooted(request, schedule);
    case OpKind::kAllGather:
      return schedule_all_gather(request, schedule);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(request, schedule);
    default:
      schedule.clear();
  }
}

}  // namespace procgroup
