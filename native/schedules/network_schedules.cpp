#include "schedules/network_schedules.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace procgroup {
namespace {

using Place = NetworkPlace;
using Kind = NetworkStep::Kind;

// A run of elements, or one segment of it.
struct Part {
  Place place;
  size_t elements = 0;
};

// The segment of that number of what goes to, or comes from, a peer; no elements behind the end.
using SegmentOf = std::function<Part(int peer, size_t index)>;

Place input(size_t offset, int block = 0) { return {Place::Kind::kInput, block, offset}; }
Place output(size_t offset, int block = 0) { return {Place::Kind::kOutput, block, offset}; }
Place scratch(size_t offset) { return {Place::Kind::kScratch, 0, offset}; }

class Builder {
 public:
  explicit Builder(const NetworkScheduleRequest& request) : request_(request) {}

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  bool is_root() const { return rank() == request_.root; }
  int at_distance(int distance) const { return (rank() + distance + size()) % size(); }
  size_t segments_of(size_t elements) const {
    return (elements + request_.segment_elements - 1) / request_.segment_elements;
  }
  Part segment(Part part, size_t index) const {
    const size_t begin = std::min(index * request_.segment_elements, part.elements);
    part.place.offset += begin;
    part.elements = std::min(request_.segment_elements, part.elements - begin);
    return part;
  }
  // The part of one array that `owner` reduces: whole elements, the first ranks take one more.
  Part block(Place array, int owner) const {
    const size_t ranks = static_cast<size_t>(size());
    const size_t index = static_cast<size_t>(owner);
    array.offset += request_.count / ranks * index + std::min(index, request_.count % ranks);
    return {array, request_.count / ranks + (index < request_.count % ranks ? 1 : 0)};
  }

  void copy(Place to, Part from) { add({Kind::kCopy, -1, from.elements, to, from.place, {}}); }
  void send(int peer, Part from) { add({Kind::kSend, peer, from.elements, {}, from.place, {}}); }
  void receive(int peer, Part to) { add({Kind::kReceive, peer, to.elements, to.place, {}, {}}); }
  void exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes);
  void exchange_all(size_t longest, const SegmentOf& gives, const SegmentOf& takes);
  // `result` is where our own segments go, `pass_on` what is done with one that was reduced.
  void reduce_scatter(size_t longest, const SegmentOf& inputs, const std::function<Place(size_t index)>& result,
                      const std::function<void(size_t index)>& pass_on);

  NetworkSchedule schedule;

 private:
  void add(const NetworkStep& step) {
    if (step.elements > 0) schedule.steps.push_back(step);
  }
  // Scratch is used in two halves by turns: one is being received while the other is being reduced.
  Place slot(size_t index, int source) const {
    return scratch(((index % 2) * static_cast<size_t>(size()) + static_cast<size_t>(source)) * schedule.source_stride);
  }

  const NetworkScheduleRequest& request_;
};

void Builder::exchange(size_t index, const SegmentOf& gives, const SegmentOf& takes) {
  for (int distance = 1; distance < size(); ++distance) {
    receive(at_distance(-distance), takes(at_distance(-distance), index));
    send(at_distance(distance), gives(at_distance(distance), index));
  }
}

void Builder::exchange_all(size_t longest, const SegmentOf& gives, const SegmentOf& takes) {
  for (size_t index = 0; index < segments_of(longest); ++index) exchange(index, gives, takes);
}

void Builder::reduce_scatter(size_t longest, const SegmentOf& inputs, const std::function<Place(size_t index)>& result,
                             const std::function<void(size_t index)>& pass_on) {
  schedule.source_stride = std::min(longest, request_.segment_elements);
  schedule.scratch_elements = 2 * static_cast<size_t>(size()) * schedule.source_stride;
  const size_t segments = segments_of(longest);
  const SegmentOf into_scratch = [&](int peer, size_t index) {
    return Part{slot(index, peer), inputs(rank(), index).elements};
  };
  for (size_t index = 0; index <= segments; ++index) {
    if (index < segments) exchange(index, inputs, into_scratch);
    if (index == 0) continue;
    const Part own = inputs(rank(), index - 1);
    add({Kind::kReduce, -1, own.elements, result(index - 1), slot(index - 1, 0), own.place});
    pass_on(index - 1);
  }
}

// Also of one rank: it keeps what it has.
NetworkSchedule schedule_all_reduce(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(input(0), owner), index);
  };
  const SegmentOf outputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(output(0), owner), index);
  };
  const SegmentOf own = [&](int, size_t index) { return outputs(request.rank, index); };
  builder.reduce_scatter(
      builder.block({}, 0).elements, inputs, [&](size_t index) { return outputs(request.rank, index).place; },
      [&](size_t index) { builder.exchange(index, own, outputs); });
  return std::move(builder.schedule);
}

// Other ranks than the root have no output: what they reduce lies behind the sources, in two halves too.
NetworkSchedule schedule_reduce(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const size_t longest = builder.block({}, 0).elements;
  const size_t half = std::min(longest, request.segment_elements);
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment(builder.block(input(0), owner), index);
  };
  const auto result = [&](size_t index) {
    const size_t sources = 2 * static_cast<size_t>(request.size) * half;
    return builder.is_root() ? builder.segment(builder.block(output(0), request.rank), index).place
                             : scratch(sources + index % 2 * half);
  };
  const SegmentOf own = [&](int peer, size_t index) {
    return Part{result(index), peer == request.root ? inputs(request.rank, index).elements : 0};
  };
  const SegmentOf outputs = [&](int owner, size_t index) {
    return builder.is_root() ? builder.segment(builder.block(output(0), owner), index) : Part{};
  };
  builder.reduce_scatter(longest, inputs, result, [&](size_t index) { builder.exchange(index, own, outputs); });
  if (!builder.is_root()) builder.schedule.scratch_elements += 2 * half;
  return std::move(builder.schedule);
}

NetworkSchedule schedule_reduce_scatter(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const SegmentOf inputs = [&](int owner, size_t index) {
    return builder.segment({input(0, owner), request.inputs[static_cast<size_t>(owner)]}, index);
  };
  builder.reduce_scatter(
      *std::ranges::max_element(request.inputs), inputs,
      [&](size_t index) { return output(index * request.segment_elements); }, [](size_t) {});
  return std::move(builder.schedule);
}

NetworkSchedule schedule_all_gather(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const Part whole{input(0), request.outputs[static_cast<size_t>(request.rank)]};
  builder.copy(output(0, request.rank), whole);
  builder.exchange_all(
      *std::ranges::max_element(request.outputs), [&](int, size_t index) { return builder.segment(whole, index); },
      [&](int peer, size_t index) {
        return builder.segment({output(0, peer), request.outputs[static_cast<size_t>(peer)]}, index);
      });
  return std::move(builder.schedule);
}

NetworkSchedule schedule_gather(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const Part whole{input(0), request.count};
  if (builder.is_root()) builder.copy(output(0, request.rank), whole);
  builder.exchange_all(
      request.count,
      [&](int peer, size_t index) { return peer == request.root ? builder.segment(whole, index) : Part{}; },
      [&](int peer, size_t index) {
        return builder.is_root() ? builder.segment({output(0, peer), request.count}, index) : Part{};
      });
  return std::move(builder.schedule);
}

NetworkSchedule schedule_scatter(const NetworkScheduleRequest& request) {
  Builder builder(request);
  if (builder.is_root()) builder.copy(output(0), {input(0, request.rank), request.count});
  builder.exchange_all(
      request.count,
      [&](int peer, size_t index) {
        return builder.is_root() ? builder.segment({input(0, peer), request.count}, index) : Part{};
      },
      [&](int peer, size_t index) {
        return peer == request.root ? builder.segment({output(0), request.count}, index) : Part{};
      });
  return std::move(builder.schedule);
}

NetworkSchedule schedule_all_to_all(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const SegmentOf gives = [&](int peer, size_t index) {
    return builder.segment({input(0, peer), request.inputs[static_cast<size_t>(peer)]}, index);
  };
  const SegmentOf takes = [&](int peer, size_t index) {
    return builder.segment({output(0, peer), request.outputs[static_cast<size_t>(peer)]}, index);
  };
  const size_t own = request.inputs[static_cast<size_t>(request.rank)];
  builder.copy(output(0, request.rank), {input(0, request.rank), own});
  builder.exchange_all(std::max(*std::ranges::max_element(request.inputs), *std::ranges::max_element(request.outputs)),
                       gives, takes);
  return std::move(builder.schedule);
}

NetworkSchedule schedule_broadcast(const NetworkScheduleRequest& request) {
  Builder builder(request);
  const int next = builder.at_distance(1);
  const auto receive = [&](size_t index) {
    if (!builder.is_root())
      builder.receive(builder.at_distance(-1), builder.segment({output(0), request.count}, index));
  };
  receive(0);
  for (size_t index = 0; index < builder.segments_of(request.count); ++index) {
    receive(index + 1);  // before the send, which waits for its own segment
    const Place from = builder.is_root() ? input(0) : output(0);
    if (next != request.root) builder.send(next, builder.segment({from, request.count}, index));
  }
  if (builder.is_root()) builder.copy(output(0), {input(0), request.count});
  return std::move(builder.schedule);
}

}  // namespace

NetworkSchedule schedule_network(OpKind op, const NetworkScheduleRequest& request) {
  switch (op) {
    case OpKind::kAllReduce:
      return schedule_all_reduce(request);
    case OpKind::kReduce:
      return schedule_reduce(request);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(request);
    case OpKind::kAllGather:
      return schedule_all_gather(request);
    case OpKind::kGather:
      return schedule_gather(request);
    case OpKind::kScatter:
      return schedule_scatter(request);
    case OpKind::kAllToAll:
      return schedule_all_to_all(request);
    case OpKind::kBroadcast:
      return schedule_broadcast(request);
    default:
      return {};
  }
}

}  // namespace procgroup
