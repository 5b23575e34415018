#include "schedules/message_schedules.hpp"

#include <algorithm>
#include <functional>

namespace procgroup {
namespace {

// Bytes from a place on: a block, or one segment of it.
struct Run {
  Place place;
  size_t bytes = 0;
};

// The segment of that number of what goes to, or comes from, a peer; no bytes behind the end.
using SegmentOf = std::function<Run(int peer, size_t index)>;

Place input(size_t offset, int block = 0) { return {.kind = Place::Kind::kInput, .rank = block, .offset = offset}; }
Place output(size_t offset, int block = 0) { return {.kind = Place::Kind::kOutput, .rank = block, .offset = offset}; }
Place scratch(size_t offset, int source = 0) {
  return {.kind = Place::Kind::kScratch, .rank = source, .offset = offset};
}

size_t longest_of(const std::vector<size_t>& sizes) { return *std::ranges::max_element(sizes); }

class Builder : public ScheduleWriter {
 public:
  Builder(const MessageScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(schedule, request.rank, request.size), request_(request) {}

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  bool is_root() const { return rank() == request_.root; }
  int at_distance(int distance) const { return (rank() + distance + size()) % size(); }
  size_t segments_of(size_t bytes) const { return (bytes + request_.segment_bytes - 1) / request_.segment_bytes; }
  Run segment(Run run, size_t index) const {
    const size_t begin = std::min(index * request_.segment_bytes, run.bytes);
    run.place.offset += begin;
    run.bytes = std::min(request_.segment_bytes, run.bytes - begin);
    return run;
  }
  // The block of one array that `owner` reduces.
  Run block(Place array, int owner) const {
    const Range range = block_of(request_.bytes, request_.element_bytes, size(), owner);
    array.offset += range.offset;
    return {array, range.bytes};
  }

  void exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes);
  void exchange_all(size_t longest, const SegmentOf& gives, const SegmentOf& takes);
  // `result` is where our own segments go, `pass_on` what is done with one that was reduced.
  void reduce_scatter(size_t longest, const SegmentOf& inputs, const std::function<Place(size_t index)>& result,
                      const std::function<void(size_t index)>& pass_on);
  void reduce_prefix(OpKind op);
  // More scratch behind the sources; its offset.
  size_t more_scratch(size_t bytes) {
    schedule_.scratch_bytes += bytes;
    return schedule_.scratch_bytes - bytes;
  }

 private:
  // The sources of a reduction are used in two halves by turns: one is received while the other is reduced.
  Place source(size_t index, int peer) const {
    return scratch(index % 2 * static_cast<size_t>(size()) * schedule_.source_stride, peer);
  }

  const MessageScheduleRequest& request_;
};

void Builder::exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes) {
  for (int distance = 1; distance < size(); ++distance) {
    const int source = at_distance(-distance);
    const int target = at_distance(distance);
    const Run taken = takes(source, index);
    const Run given = gives(target, index);
    receive(source, taken.place, taken.bytes);
    send(target, given.place, given.bytes);
  }
}

void Builder::exchange_all(size_t longest, const SegmentOf& gives, const SegmentOf& takes) {
  for (size_t index = 0; index < segments_of(longest); ++index) exchange(index, gives, takes);
}

void Builder::reduce_scatter(size_t longest, const SegmentOf& inputs, const std::function<Place(size_t index)>& result,
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
void Builder::reduce_prefix(OpKind op) {
  schedule_.source_stride = std::min(request_.bytes, request_.segment_bytes);
  schedule_.scratch_bytes = 2 * static_cast<size_t>(size()) * schedule_.source_stride;
  const int sources = sources_of(op, rank(), size());
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

// Also of one rank: it keeps what it has.
void schedule_all_reduce(Builder& builder) {
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(input(0), owner), index);
  };
  const SegmentOf outputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(output(0), owner), index);
  };
  const SegmentOf own = [&](int, size_t index) { return outputs(builder.rank(), index); };
  builder.reduce_scatter(
      builder.block({}, 0).bytes, inputs, [&](size_t index) { return outputs(builder.rank(), index).place; },
      [&](size_t index) { builder.exchange(index, own, outputs); });
}

// Other ranks than the root have no output: what they reduce lies behind the sources, in two halves too.
void schedule_reduce(Builder& builder, const MessageScheduleRequest& request) {
  const size_t longest = builder.block({}, 0).bytes;
  const size_t half = std::min(longest, request.segment_bytes);
  const size_t results = builder.is_root() ? 0 : builder.more_scratch(2 * half);
  const size_t sources = 2 * static_cast<size_t>(request.size) * half;
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(input(0), owner), index);
  };
  const auto result = [&](size_t index) {
    return builder.is_root() ? builder.segment(builder.block(output(0), request.rank), index).place
                             : scratch(sources + results + index % 2 * half);
  };
  const SegmentOf own = [&](int peer, size_t index) {
    return Run{result(index), peer == request.root ? inputs(request.rank, index).bytes : 0};
  };
  const SegmentOf outputs = [&](int owner, size_t index) {
    return builder.is_root() ? builder.segment(builder.block(output(0), owner), index) : Run{};
  };
  builder.reduce_scatter(longest, inputs, result, [&](size_t index) { builder.exchange(index, own, outputs); });
}

void schedule_reduce_scatter(Builder& builder, const MessageScheduleRequest& request) {
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment({input(0, owner), request.inputs[static_cast<size_t>(owner)]}, index);
  };
  builder.reduce_scatter(
      longest_of(request.inputs), inputs, [&](size_t index) { return output(index * request.segment_bytes); },
      [](size_t) {});
}

void schedule_all_gather(Builder& builder, const MessageScheduleRequest& request) {
  const Run whole{input(0), request.outputs[static_cast<size_t>(request.rank)]};
  builder.copy(output(0, request.rank), whole.place, whole.bytes);
  builder.exchange_all(
      longest_of(request.outputs), [&](int, size_t index) { return builder.segment(whole, index); },
      [&](int peer, size_t index) {
        return builder.segment({output(0, peer), request.outputs[static_cast<size_t>(peer)]}, index);
      });
}

void schedule_gather(Builder& builder, const MessageScheduleRequest& request) {
  const Run whole{input(0), request.bytes};
  if (builder.is_root()) builder.copy(output(0, request.rank), whole.place, whole.bytes);
  builder.exchange_all(
      request.bytes,
      [&](int peer, size_t index) { return peer == request.root ? builder.segment(whole, index) : Run{}; },
      [&](int peer, size_t index) {
        return builder.is_root() ? builder.segment({output(0, peer), request.bytes}, index) : Run{};
      });
}

void schedule_scatter(Builder& builder, const MessageScheduleRequest& request) {
  if (builder.is_root()) builder.copy(output(0), input(0, request.rank), request.bytes);
  builder.exchange_all(
      request.bytes,
      [&](int peer, size_t index) {
        return builder.is_root() ? builder.segment({input(0, peer), request.bytes}, index) : Run{};
      },
      [&](int peer, size_t index) {
        return peer == request.root ? builder.segment({output(0), request.bytes}, index) : Run{};
      });
}

void schedule_all_to_all(Builder& builder, const MessageScheduleRequest& request) {
  const SegmentOf gives = [&](int peer, size_t index) {
    return builder.segment({input(0, peer), request.inputs[static_cast<size_t>(peer)]}, index);
  };
  const SegmentOf takes = [&](int peer, size_t index) {
    return builder.segment({output(0, peer), request.outputs[static_cast<size_t>(peer)]}, index);
  };
  const size_t own = request.inputs[static_cast<size_t>(request.rank)];
  builder.copy(output(0, request.rank), input(0, request.rank), own);
  builder.exchange_all(std::max(longest_of(request.inputs), longest_of(request.outputs)), gives, takes);
}

void schedule_broadcast(Builder& builder, const MessageScheduleRequest& request) {
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

void schedule_messages(OpKind op, const MessageScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  switch (op) {
    case OpKind::kAllReduce:
      return schedule_all_reduce(builder);
    case OpKind::kReduce:
      return schedule_reduce(builder, request);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(builder, request);
    case OpKind::kAllGather:
      return schedule_all_gather(builder, request);
    case OpKind::kGather:
      return schedule_gather(builder, request);
    case OpKind::kScatter:
      return schedule_scatter(builder, request);
    case OpKind::kAllToAll:
      return schedule_all_to_all(builder, request);
    case OpKind::kBroadcast:
      return schedule_broadcast(builder, request);
    case OpKind::kScan:
    case OpKind::kExscan:
      return builder.reduce_prefix(op);
    default:
      return;
  }
}

}  // namespace procgroup
