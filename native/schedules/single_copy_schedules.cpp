#include "schedules/single_copy_schedules.hpp"

#include <algorithm>

#include "schedules/schedule_writer.hpp"

namespace procgroup {
namespace {

class Builder : public ScheduleWriter {
 public:
  Builder(const ScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(request, schedule), chunk_(whole_elements(request.chunk_bytes)) {}

  void keep_own(int input_block, int output_block) {
    copy(output(0, output_block), input(0, input_block), request_.blocks.between(request_.rank, request_.rank));
  }
  void copy_from(int peer, int output_block) {
    in_chunks(request_.blocks.between(peer, request_.rank), [&](size_t offset, size_t bytes) {
      read(output(offset, output_block), {.kind = Place::Kind::kPeerInput, .rank = peer, .offset = offset}, bytes);
    });
  }
  // All ranks' blocks for this rank become its output.
  void combine(int own_block) {
    in_chunks(request_.blocks.between(request_.rank, request_.rank), [&](size_t offset, size_t bytes) {
      read_reduce(output(offset), {.kind = Place::Kind::kPeerInput, .offset = offset}, input(offset, own_block), bytes);
    });
  }
  // Say that this rank has read what it needs.
  void acknowledge() { publish(schedule_.published + 1); }

  template <class Visit>
  void in_chunks(size_t bytes, Visit visit) const {
    for (size_t offset = 0; offset < bytes; offset += chunk_) visit(offset, std::min(chunk_, bytes - offset));
  }

 private:
  const size_t chunk_;
};

// The segment of a chunk that `rank` reduces.
Range segment(const ScheduleRequest& request, size_t offset, size_t bytes, int rank) {
  const Range block = block_of(bytes, request.element_bytes, request.size, rank);
  return {offset + block.offset, block.bytes};
}

void schedule_broadcast(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  if (request.rank != request.root) builder.copy_from(request.root, 0);
  builder.acknowledge();
  if (request.rank == request.root) builder.await(kEveryone, 1);
}

void schedule_reduce(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  if (request.rank == request.root) builder.combine(0);
  builder.acknowledge();
  if (request.rank != request.root) builder.await(request.root, 1);
}

void schedule_all_reduce(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  uint64_t done = 0;
  builder.in_chunks(request.blocks.between(request.rank, request.rank), [&](size_t offset, size_t bytes) {
    const Range mine = segment(request, offset, bytes, request.rank);
    builder.read_reduce(output(mine.offset), {.kind = Place::Kind::kPeerInput, .offset = mine.offset},
                        input(mine.offset), mine.bytes);
    builder.publish(++done);
    builder.for_each_peer([&](int peer) {
      const Range theirs = segment(request, offset, bytes, peer);
      builder.await(peer, done);
      builder.read(output(theirs.offset), {.kind = Place::Kind::kPeerOutput, .rank = peer, .offset = theirs.offset},
                   theirs.bytes);
    });
  });
  builder.acknowledge();
  builder.await(kEveryone, done + 1);
}

void schedule_gather(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  if (request.rank == request.root) {
    builder.keep_own(0, request.rank);
    builder.for_each_peer([&](int peer) { builder.copy_from(peer, peer); });
  }
  builder.acknowledge();
  if (request.rank != request.root) builder.await(request.root, 1);
}

void schedule_scatter(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  if (request.rank == request.root)
    builder.keep_own(request.rank, 0);
  else
    builder.copy_from(request.root, 0);
  builder.acknowledge();
  if (request.rank == request.root) builder.await(kEveryone, 1);
}

// all_gather, too.
void schedule_all_to_all(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  builder.for_each_peer([&](int peer) { builder.copy_from(peer, peer); });
  builder.acknowledge();
  builder.keep_own(has_input_blocks(request.op) ? request.rank : 0, request.rank);
  builder.await(kEveryone, 1);
}

void schedule_reduce_scatter(const ScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  builder.combine(request.rank);
  builder.acknowledge();
  builder.await(kEveryone, 1);
}

}  // namespace

void schedule_reading(const ScheduleRequest& request, Schedule& schedule) {
  switch (request.op) {
    case OpKind::kBroadcast:
      return schedule_broadcast(request, schedule);
    case OpKind::kReduce:
      return schedule_reduce(request, schedule);
    case OpKind::kAllReduce:
      return schedule_all_reduce(request, schedule);
    case OpKind::kGather:
      return schedule_gather(request, schedule);
    case OpKind::kScatter:
      return schedule_scatter(request, schedule);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(request, schedule);
    default:
      return schedule_all_to_all(request, schedule);
  }
}

}  // namespace procgroup
