#include "schedules/single_copy_schedules.hpp"

#include <algorithm>

namespace procgroup {
namespace {

constexpr Place input(int block, size_t offset = 0) {
  return {.kind = Place::Kind::kInput, .rank = block, .offset = offset};
}
constexpr Place output(int block, size_t offset = 0) {
  return {.kind = Place::Kind::kOutput, .rank = block, .offset = offset};
}

class SingleCopyScheduleBuilder : public ScheduleWriter {
 public:
  SingleCopyScheduleBuilder(const SingleCopyScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(schedule, request.rank, request.size),
        request_(request),
        chunk_(std::max(request.chunk_bytes / request.element_bytes, size_t{1}) * request.element_bytes) {}

  size_t chunk() const { return chunk_; }
  void keep_own(int input_block, int output_block) {
    copy(output(output_block), input(input_block), request_.blocks.between(request_.rank, request_.rank));
  }
  void collect(int peer, int output_block) {
    in_chunks(request_.blocks.between(peer, request_.rank), [&](size_t offset, size_t bytes) {
      read(output(output_block, offset), {.kind = Place::Kind::kPeerInput, .rank = peer, .offset = offset}, bytes);
    });
  }
  // All ranks' blocks for this rank become its output.
  void combine(int own_block) {
    in_chunks(request_.blocks.between(request_.rank, request_.rank), [&](size_t offset, size_t bytes) {
      read_reduce(output(0, offset), {.kind = Place::Kind::kPeerInput, .offset = offset}, input(own_block, offset),
                  bytes);
    });
  }
  // Say that this rank has read what it needs.
  void acknowledge() { publish(schedule_.published + 1); }

  template <class Visit>
  void in_chunks(size_t bytes, Visit visit) const {
    for (size_t offset = 0; offset < bytes; offset += chunk_) visit(offset, std::min(chunk_, bytes - offset));
  }
  // The others, beginning with the next rank, so that not everybody reads the same array at once.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int step = 1; step < request_.size; ++step) visit((request_.rank + step) % request_.size);
  }

 private:
  const SingleCopyScheduleRequest& request_;
  size_t chunk_;
};

// The segment of a chunk that `rank` reduces.
Range segment(const SingleCopyScheduleRequest& request, size_t offset, size_t bytes, int rank) {
  const Range block = block_of(bytes, request.element_bytes, request.size, rank);
  return {offset + block.offset, block.bytes};
}

}  // namespace

void schedule_reading_broadcast(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  if (request.rank != request.root) builder.collect(request.root, 0);
  builder.acknowledge();
  if (request.rank == request.root) builder.await(kEveryone, 1);
}

void schedule_reading_reduce(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  if (request.rank == request.root) builder.combine(0);
  builder.acknowledge();
  if (request.rank != request.root) builder.await(request.root, 1);
}

void schedule_reading_all_reduce(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  uint64_t done = 0;
  builder.in_chunks(request.blocks.between(request.rank, request.rank), [&](size_t offset, size_t bytes) {
    const Range mine = segment(request, offset, bytes, request.rank);
    builder.read_reduce(output(0, mine.offset), {.kind = Place::Kind::kPeerInput, .offset = mine.offset},
                        input(0, mine.offset), mine.bytes);
    builder.publish(++done);
    builder.for_each_peer([&](int peer) {
      const Range theirs = segment(request, offset, bytes, peer);
      builder.await(peer, done);
      builder.read(output(0, theirs.offset), {.kind = Place::Kind::kPeerOutput, .rank = peer, .offset = theirs.offset},
                   theirs.bytes);
    });
  });
  builder.acknowledge();
  builder.await(kEveryone, done + 1);
}

void schedule_reading_gather(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  if (request.rank == request.root) {
    builder.keep_own(0, request.rank);
    builder.for_each_peer([&](int peer) { builder.collect(peer, peer); });
  }
  builder.acknowledge();
  if (request.rank != request.root) builder.await(request.root, 1);
}

void schedule_reading_scatter(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  if (request.rank == request.root)
    builder.keep_own(request.rank, 0);
  else
    builder.collect(request.root, 0);
  builder.acknowledge();
  if (request.rank == request.root) builder.await(kEveryone, 1);
}

void schedule_reading_all_to_all(const SingleCopyScheduleRequest& request, bool inputs, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  builder.for_each_peer([&](int peer) { builder.collect(peer, peer); });
  builder.acknowledge();
  builder.keep_own(inputs ? request.rank : 0, request.rank);
  builder.await(kEveryone, 1);
}

void schedule_reading_reduce_scatter(const SingleCopyScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleBuilder builder(request, schedule);
  builder.combine(request.rank);
  builder.acknowledge();
  builder.await(kEveryone, 1);
}

}  // namespace procgroup
