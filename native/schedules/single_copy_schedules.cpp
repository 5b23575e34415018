// Schedules in which ranks read each other's arrays in place: one copy, no slots.
//
// Nobody writes another's array. A rank publishes when it has read what it needs; a rank whose array others read ends
// its call only after they have published. all_reduce, in which results are read too:
//
//     read my segment of chunk k of all arrays, and reduce it into my output | publish k+1
//     for each other rank: await its k+1 | read its segment of chunk k from its output
//
// In place, a rank overwrites its own segment, which only it reads, and then the segments of ranks that have published,
// and so have read them: no element is overwritten before everybody has done with it.
#include <algorithm>

#include "schedules/schedule_writer.hpp"

namespace procgroup {
namespace {

class SingleCopyScheduleWriter : public ScheduleWriter {
 public:
  SingleCopyScheduleWriter(const ScheduleRequest& request, Schedule& schedule)
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

void schedule_all_reduce(const ScheduleRequest& request, Schedule& schedule) {
  SingleCopyScheduleWriter builder(request, schedule);
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

}  // namespace

void schedule_reading(const ScheduleRequest& request, Schedule& schedule) {
  const OpKind op = request.op;
  if (op == OpKind::kAllReduce) return schedule_all_reduce(request, schedule);
  SingleCopyScheduleWriter builder(request, schedule);
  const auto gives_to_others = [&](int rank) { return gives(op, rank, request.root); };
  const bool takes_any = takes(op, request.rank, request.root);
  if (takes_any && reduces(op))
    builder.combine(has_input_blocks(op) ? request.rank : 0);
  else if (takes_any)
    builder.for_each_peer([&](int peer) {
      if (gives_to_others(peer)) builder.copy_from(peer, has_output_blocks(op) ? peer : 0);
    });
  builder.acknowledge();
  if (takes_any && gives_to_others(request.rank) && !reduces(op))
    builder.keep_own(has_input_blocks(op) ? request.rank : 0, has_output_blocks(op) ? request.rank : 0);
  const bool root_reads = row_of(op).takers == Ranks::kRoot;
  if (root_reads && request.rank != request.root) builder.await(request.root, 1);
  if (!root_reads && gives_to_others(request.rank)) builder.await(kEveryone, 1);
}

}  // namespace procgroup
