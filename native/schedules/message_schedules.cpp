// Schedules for large collectives by messages alone: pure arithmetic, executed elsewhere.
//
// Vocabulary, beside that of schedule.hpp. What one rank has for another is a *block*; it is moved in *segments* of at
// most `segment_bytes`, each of which is one message. In an *exchange* every rank sends one segment of each of its
// blocks to the rank it is for, first to the next rank, then to the one after that; so no rank gets all messages at
// once.
//
//   gather, scatter, all_gather, all_to_all   exchanges, until the longest block is through
//   reduce_scatter                            exchanges into scratch; after each, a rank reduces what it got from all
//   all_reduce                                the array is split into a block per rank: as reduce_scatter, and what was
//                                             reduced goes to everybody in an exchange of its own
//   reduce                                    the same, but what was reduced goes to the root
//   broadcast                                 a chain that begins at the root; each rank sends on what has come
//
// Order of reduction: always that of the ranks, ((in[0] op in[1]) op in[2]) ..., by the same function that reduces in
// shared memory; so both give the same bits, and float16 and bfloat16 are rounded once. No rank sends or receives more
// than in a ring, where the order is another one for each block and each hop rounds or widens what travels.
#include <algorithm>
#include <functional>

#include "schedules/schedule_writer.hpp"

namespace procgroup {
namespace {

// Bytes from a place on: a block, or one segment of it.
struct Run {
  Place place;
  size_t bytes = 0;
};

// The segment of that number of what goes to, or comes from, a peer; no bytes behind the end.
using SegmentOf = std::function<Run(int peer, size_t index)>;

class MessageScheduleWriter : public ScheduleWriter {
 public:
  using ScheduleWriter::ScheduleWriter;

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  bool is_root() const { return rank() == request_.root; }
  int at_distance(int distance) const { return (rank() + distance + size()) % size(); }
  size_t segments_of(size_t bytes) const { return parts_of(bytes, request_.segment_bytes); }
  Run segment(const Run& run, size_t index) const {
    const Range part = part_of(run.bytes, index, request_.segment_bytes);
    return {moved(run.place, part.offset), part.bytes};
  }
  // A segment of the block of one array that `owner` reduces.
  Run of_block(Place array, int owner, size_t index) const {
    const Range range = block_of(request_.bytes, request_.element_bytes, size(), owner);
    return segment({moved(array, range.offset), range.bytes}, index);
  }
  size_t longest_block() const { return block_of(request_.bytes, request_.element_bytes, size(), 0).bytes; }

  void exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes);
  void exchange_blocks();
  // `result` is where our own segments go, `pass_on` what is done with one that was reduced.
  void reduce_scatter(size_t longest, const SegmentOf& inputs, const std::function<Place(size_t index)>& result,
                      const std::function<void(size_t index)>& pass_on);
  void reduce_prefix();

 private:
  // The sources of a reduction are used in two halves by turns: one is received while the other is reduced.
  Place source(size_t index, int peer) const {
    return scratch(index % 2 * static_cast<size_t>(size()) * schedule_.source_stride, peer);
  }
};

void MessageScheduleWriter::exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes) {
  for (int distance = 1; distance < size(); ++distance) {
    const int source = at_distance(-distance);
    const int target = at_distance(distance);
    const Run taken = takes(source, index);
    const Run given = gives(target, index);
    receive(source, taken.place, taken.bytes);
    send(target, given.place, given.bytes);
  }
}

// gather, all_gather, scatter, all_to_all.
void MessageScheduleWriter::exchange_blocks() {
  const auto given = [&](int to) {
    return Run{input(0, has_input_blocks(request_.op) ? to : 0), request_.between(rank(), to)};
  };
  const auto taken = [&](int from) {
    return Run{output(0, has_output_blocks(request_.op) ? from : 0), request_.between(from, rank())};
  };
  copy(taken(rank()).place, given(rank()).place, given(rank()).bytes);
  size_t longest = 0;
  for_each_peer([&](int peer) { longest = std::max({longest, given(peer).bytes, taken(peer).bytes}); });
  for (size_t index = 0; index < segments_of(longest); ++index)
    exchange(
        index, [&](int to, size_t) { return segment(given(to), index); },
        [&](int from, size_t) { return segment(taken(from), index); });
}

void MessageScheduleWriter::reduce_scatter(size_t longest, const SegmentOf& inputs,
                                           const std::function<Place(size_t index)>& result,
                                           const std::function<void(size_t index)>& pass_on) {
  schedule_.source_stride = std::min(longest, request_.segment_bytes);
  schedule_.scratch_bytes += 2 * static_cast<size_t>(size()) * schedule_.source_stride;
  const size_t segments = segments_of(longest);
  const SegmentOf into_scratch = [&](int peer, size_t index) {
    return Run{source(index, peer), inputs(rank(), index).bytes};
  };
  for (size_t index = 0; index <= segments; ++index) {
    if (index < segments) exchange(index, inputs, into_scratch);
    if (index == 0) continue;
    const Run own = inputs(rank(), index - 1);
    reduce(result(index - 1), source(index - 1, 0), own.place, own.bytes);
    pass_on(index - 1);
  }
}

// scan, exscan: each rank sends its array to all higher ones, and reduces what came from the lower ones.
void MessageScheduleWriter::reduce_prefix() {
  schedule_.source_stride = std::min(request_.bytes, request_.segment_bytes);
  schedule_.scratch_bytes = 2 * static_cast<size_t>(size()) * schedule_.source_stride;
  const int sources = sources_of(request_.op, rank(), size());
  const auto own = [&](size_t index) { return segment({input(0), request_.bytes}, index); };
  const SegmentOf gives = [&](int peer, size_t index) { return peer > rank() ? own(index) : Run{}; };
  const SegmentOf takes = [&](int peer, size_t index) {
    return peer < rank() ? Run{source(index, peer), own(index).bytes} : Run{};
  };
  const size_t segments = segments_of(request_.bytes);
  for (size_t index = 0; index <= segments; ++index) {
    if (index < segments) exchange(index, gives, takes);
    if (index == 0 || sources == 0) continue;
    const Run reduced = own(index - 1);
    reduce_from(sources, rank(), output(reduced.place.offset), source(index - 1, 0), reduced.place, reduced.bytes);
  }
}

// all_reduce, also of one rank, which keeps its input; reduce. Ranks other than the root have no output: they reduce
// into scratch behind the sources, also in two halves.
void schedule_reduction(MessageScheduleWriter& builder, const ScheduleRequest& request) {
  const bool has_output = request.root < 0 || builder.is_root();
  const size_t longest = builder.longest_block();
  const size_t half = std::min(longest, request.segment_bytes);
  const size_t sources = 2 * static_cast<size_t>(request.size) * half;
  if (!has_output) builder.more_scratch(2 * half);
  const SegmentOf inputs = [&](int owner, size_t index) { return builder.of_block(input(0), owner, index); };
  const SegmentOf outputs = [&](int owner, size_t index) {
    return has_output ? builder.of_block(output(0), owner, index) : Run{};
  };
  const auto result = [&](size_t index) {
    return has_output ? outputs(request.rank, index).place : scratch(sources + index % 2 * half);
  };
  const SegmentOf own = [&](int peer, size_t index) {
    const bool is_taken = request.root < 0 || peer == request.root;
    return Run{result(index), is_taken ? inputs(request.rank, index).bytes : 0};
  };
  builder.reduce_scatter(longest, inputs, result, [&](size_t index) { builder.exchange(index, own, outputs); });
}

void schedule_reduce_scatter(MessageScheduleWriter& builder, const ScheduleRequest& request) {
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment({input(0, owner), request.blocks.between(request.rank, owner)}, index);
  };
  builder.reduce_scatter(
      request.blocks.largest(), inputs, [&](size_t index) { return output(index * request.segment_bytes); },
      [](size_t) {});
}

void schedule_broadcast(MessageScheduleWriter& builder, const ScheduleRequest& request) {
  const int next = builder.at_distance(1);
  const Run whole{builder.is_root() ? input(0) : output(0), request.bytes};
  const auto receive = [&](size_t index) {
    const Run taken = builder.segment(whole, index);
    if (!builder.is_root()) builder.receive(builder.at_distance(-1), taken.place, taken.bytes);
  };
  receive(0);
  for (size_t index = 0; index < builder.segments_of(request.bytes); ++index) {
    receive(index + 1);  // before the send, which waits for its own segment
    const Run given = builder.segment(whole, index);
    if (next != request.root) builder.send(next, given.place, given.bytes);
  }
  if (builder.is_root()) builder.copy(output(0), input(0), request.bytes);
}

}  // namespace

void schedule_messages(const ScheduleRequest& request, Schedule& schedule) {
  MessageScheduleWriter builder(request, schedule);
  switch (request.op) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return schedule_reduction(builder, request);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(builder, request);
    case OpKind::kBroadcast:
      return schedule_broadcast(builder, request);
    case OpKind::kScan:
    case OpKind::kExscan:
      return builder.reduce_prefix();
    default:
      return builder.exchange_blocks();
  }
}

}  // namespace procgroup
