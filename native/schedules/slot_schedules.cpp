// Schedules for large collectives of whole arrays through shared-memory slots: pure arithmetic, executed elsewhere.
//
// The vocabulary is that of schedule.hpp.
//
//     direct:                                reduce-scatter + all-gather:
//       copy in k | publish | await all         await all | reduce my segment of k into output and slot |
//       reduce chunk k of all slots             copy in k+1 | copy out the others' segments of k-1 | publish
//                                               (one wait per chunk: a chunk's results and the next chunk's
//                                               copies in are published together)
//
// Why no slot is overwritten too early is said at each schedule.
#include <algorithm>

#include "schedules/schedule_writer.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {
namespace {

// Writes steps in the words of the essay above.
class SlotScheduleWriter : public ScheduleWriter {
 public:
  SlotScheduleWriter(const ScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(request, schedule), chunk_(whole_elements(request.chunk_bytes)) {
    schedule_.chunks = parts_of(request.bytes, chunk_);
  }

  uint64_t chunks() const { return schedule_.chunks; }
  size_t start(uint64_t chunk) const { return chunk * chunk_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_, request_.bytes - start(chunk)); }

  Place input(uint64_t chunk) const { return procgroup::input(start(chunk)); }
  Place output(uint64_t chunk) const { return procgroup::output(start(chunk)); }
  // Where `rank` copies in a chunk: slots 0 to `slots` - 1 in turn.
  Place copied_in(uint64_t chunk, int rank, uint64_t slots, size_t offset = 0) const {
    return in_slot((request_.earlier_chunks + chunk) % slots, rank, offset);
  }
  // Where `rank` puts its part of a chunk's result: slots 2 and 3 in turn.
  Place result(uint64_t chunk, int rank) const { return in_slot(2 + (request_.earlier_chunks + chunk) % 2, rank, 0); }
  void copy_in(uint64_t chunk, uint64_t slots) {
    copy(copied_in(chunk, request_.rank, slots), input(chunk), length(chunk));
  }
  // All of a chunk but the segment that this rank reduces itself.
  void copy_in_for_others(uint64_t chunk, uint64_t slots) {
    const auto [offset, bytes] = segment(chunk, request_.rank);
    const Place to = copied_in(chunk, request_.rank, slots);
    copy(to, input(chunk), offset);
    copy(moved(to, offset + bytes), moved(input(chunk), offset + bytes), length(chunk) - offset - bytes);
  }

  // The segment of a chunk that `rank` reduces.
  Range segment(uint64_t chunk, int rank) const {
    return block_of(length(chunk), request_.element_bytes, request_.size, rank);
  }

 private:
  const size_t chunk_;
};

}  // namespace

// Chunks are copied into slots 0 and 1 in turn, results into slots 2 and 3. A rank that has published value k+1 has
// reduced its segment of chunk k-1, copied out chunk k-2 and copied in chunk k. Copying in chunk k+1 overwrites chunk
// k-1, which all ranks have reduced, since all have published k+1. Result k overwrites result k-2, which all ranks have
// copied out, for the same reason.
void schedule_all_reduce_scattered(const ScheduleRequest& request, Schedule& schedule) {
  SlotScheduleWriter builder(request, schedule);
  const uint64_t chunks = builder.chunks();
  if (chunks == 0) return;
  const auto copy_out = [&](uint64_t chunk) {
    builder.for_each_peer([&](int peer) {
      const auto [offset, bytes] = builder.segment(chunk, peer);
      builder.copy(moved(builder.output(chunk), offset), builder.result(chunk, peer), bytes);
    });
  };
  builder.copy_in_for_others(0, 2);
  builder.publish(1);
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    builder.await(kEveryone, chunk + 1);
    const auto [offset, bytes] = builder.segment(chunk, request.rank);
    builder.reduce(moved(builder.output(chunk), offset), builder.copied_in(chunk, request.rank, 2, offset),
                   moved(builder.input(chunk), offset), bytes);
    builder.share_result(builder.result(chunk, request.rank), bytes);
    if (chunk + 1 < chunks) builder.copy_in_for_others(chunk + 1, 2);
    if (chunk > 0) copy_out(chunk - 1);
    builder.publish(chunk + 2);
  }
  builder.await(kEveryone, chunks + 1);
  copy_out(chunks - 1);
}

// Each rank copies in the half of a chunk that the other reduces (value 2k+1), reduces its own half into its
// output and a slot (2k+2), and copies out the other's half. Chunks are copied into slots 0 and 1 in turn, results into
// slots 2 and 3: chunk k overwrites chunk k-2, which the other had finished when it published 2k-1.
void schedule_all_reduce_exchanged(const ScheduleRequest& request, Schedule& schedule) {
  SlotScheduleWriter builder(request, schedule);
  const int peer = 1 - request.rank;
  for (uint64_t chunk = 0; chunk < builder.chunks(); ++chunk) {
    const auto mine = builder.segment(chunk, request.rank);
    const auto theirs = builder.segment(chunk, peer);
    builder.copy(builder.copied_in(chunk, request.rank, 2), moved(builder.input(chunk), theirs.offset), theirs.bytes);
    builder.publish(2 * chunk + 1);
    builder.await(peer, 2 * chunk + 1);
    builder.reduce(moved(builder.output(chunk), mine.offset), builder.copied_in(chunk, request.rank, 2),
                   moved(builder.input(chunk), mine.offset), mine.bytes);
    builder.share_result(builder.result(chunk, request.rank), mine.bytes);
    builder.publish(2 * chunk + 2);
    builder.await(peer, 2 * chunk + 2);
    builder.copy(moved(builder.output(chunk), theirs.offset), builder.result(chunk, peer), theirs.bytes);
  }
}

namespace {

// The root publishes k+1 when chunk k is in its slot, a reader when it has copied out chunk k. Before the root
// overwrites chunk k-4 it awaits value k-3 of all.
void schedule_broadcast(const ScheduleRequest& request, Schedule& schedule) {
  SlotScheduleWriter builder(request, schedule);
  for (uint64_t chunk = 0; chunk < builder.chunks(); ++chunk) {
    if (request.rank == request.root) {
      if (chunk >= kSlots) builder.await(kEveryone, chunk - kSlots + 1);
      builder.copy_in(chunk, kSlots);
    } else {
      builder.await(request.root, chunk + 1);
      builder.copy(builder.output(chunk), builder.copied_in(chunk, request.root, kSlots), builder.length(chunk));
    }
    builder.publish(chunk + 1);
  }
}

// A sender publishes k+1 when chunk k is in its slot, the root when it has reduced chunk k. Before a sender overwrites
// chunk k-4 it awaits the root's value k-3.
void schedule_reduce(const ScheduleRequest& request, Schedule& schedule) {
  SlotScheduleWriter builder(request, schedule);
  for (uint64_t chunk = 0; chunk < builder.chunks(); ++chunk) {
    const bool is_root = request.rank == request.root;
    if (!is_root && chunk >= kSlots) builder.await(request.root, chunk - kSlots + 1);
    if (!is_root) builder.copy_in(chunk, kSlots);
    if (is_root) {
      builder.for_each_peer([&](int peer) { builder.await(peer, chunk + 1); });
      builder.reduce(builder.output(chunk), builder.copied_in(chunk, request.rank, kSlots), builder.input(chunk),
                     builder.length(chunk));
    }
    builder.publish(chunk + 1);
  }
}

// all_reduce, scan, exscan. Each rank reduces what all, or the lower ones, have copied in, from their slots: nobody
// reads an array that is overwritten. What is copied in as chunk k overwrites chunk k-4: all have published k, and so
// are done with chunk k-2.
void schedule_direct_reduction(const ScheduleRequest& request, Schedule& schedule) {
  SlotScheduleWriter builder(request, schedule);
  const int sources = sources_of(request.op, request.rank, request.size);
  for (uint64_t chunk = 0; chunk < builder.chunks(); ++chunk) {
    builder.copy_in(chunk, kSlots);
    builder.publish(chunk + 1);
    builder.await(kEveryone, chunk + 1);
    if (sources > 0)
      builder.reduce_from(sources, request.rank, builder.output(chunk), builder.copied_in(chunk, 0, kSlots),
                          builder.input(chunk), builder.length(chunk));
  }
}

}  // namespace

void schedule_slots(const ScheduleRequest& request, Schedule& schedule) {
  switch (request.op) {
    case OpKind::kBroadcast:
      return schedule_broadcast(request, schedule);
    case OpKind::kReduce:
      return schedule_reduce(request, schedule);
    case OpKind::kAllReduce:
    case OpKind::kScan:
    case OpKind::kExscan:
      return schedule_direct_reduction(request, schedule);
    default:
      schedule.clear();
  }
}

}  // namespace procgroup
