#include "algorithms/ring.hpp"

#include <algorithm>
#include <utility>

namespace procgroup {
namespace {

using Place = RingPlace;

// Reduce-scatter goes over the array in columns, each of this many segments of every block: the scratch
// for partial results then stays in the cache and small, however large the array is.
constexpr size_t kColumnSegments = 8;

// A run of elements of the whole array.
struct Range {
  size_t begin;
  size_t elements;
};

class Planner {
 public:
  explicit Planner(const RingRequest& request) : request_(request) {}

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  int next() const { return modulo(rank() + 1); }
  int previous() const { return modulo(rank() - 1); }
  int modulo(int value) const { return ((value % size()) + size()) % size(); }

  size_t block_begin(int block) const {
    const size_t ranks = static_cast<size_t>(size());
    const size_t index = static_cast<size_t>(block);
    return request_.count / ranks * index + std::min(index, request_.count % ranks);
  }
  size_t block_elements(int block) const { return block_begin(block + 1) - block_begin(block); }
  size_t longest_block() const { return block_elements(0); }  // the remainder goes to the first blocks

  size_t column_elements() const { return std::min(longest_block(), kColumnSegments * request_.segment_elements); }
  size_t segments_of(size_t elements) const {
    return (elements + request_.segment_elements - 1) / request_.segment_elements;
  }
  // Segment number `segment` of a run; empty behind its end.
  Range segment(Range run, size_t segment) const {
    const size_t begin = std::min(segment * request_.segment_elements, run.elements);
    return {run.begin + begin, std::min(request_.segment_elements, run.elements - begin)};
  }
  Range block_segment(int block, size_t index) const {
    return segment({block_begin(block), block_elements(block)}, index);
  }

  void send(int peer, size_t elements, Place from) { add({RingStep::Kind::kSend, peer, elements, {}, from}); }
  void receive(int peer, size_t elements, Place to) { add({RingStep::Kind::kReceive, peer, elements, to, {}}); }
  void local(RingStep::Kind kind, size_t elements, Place to, Place from) { add({kind, -1, elements, to, from}); }

  void reduce_scatter(Place::Kind result);
  void all_gather_blocks();
  void gather_blocks();

  RingPlan plan;

 private:
  void add(const RingStep& step) {
    if (step.elements > 0) plan.steps.push_back(step);
  }
  void reduce_scatter_segment(int round, size_t index, Place::Kind result);
  void finish_or_add(int round, size_t index, Place::Kind result);
  Place partial(int round, int block, size_t begin) const;

  const RingRequest request_;
};

Place input(size_t offset) { return {Place::Kind::kInput, 0, offset}; }
Place output(size_t offset, int rank = 0) { return {Place::Kind::kOutput, rank, offset}; }

// Rounds use two halves of the scratch in turn: one is being received while the other is being sent. All
// columns use the same scratch.
Place Planner::partial(int round, int block, size_t begin) const {
  const size_t half = static_cast<size_t>(round % 2) * column_elements();
  return {Place::Kind::kPartial, 0, half + (begin - block_begin(block)) % column_elements()};
}

// What `round` received, of block rank-2-round, gets our own elements; after the last round it is our
// own block and finished, into the place of its kind (kResult holds one block, kOutput the array).
void Planner::finish_or_add(int round, size_t index, Place::Kind result) {
  const int block = modulo(rank() - 2 - round);
  const Range part = block_segment(block, index);
  const Place arrived = partial(round, block, part.begin);
  local(RingStep::Kind::kAdd, part.elements, arrived, input(part.begin));
  if (round < size() - 2) return;
  const size_t offset = result == Place::Kind::kResult ? part.begin - block_begin(block) : part.begin;
  local(RingStep::Kind::kFinish, part.elements, {result, 0, offset}, arrived);
}

void Planner::reduce_scatter(Place::Kind result) {
  plan.partial_elements = 2 * column_elements();
  if (result == Place::Kind::kResult) plan.result_elements = longest_block();
  const size_t segments = segments_of(longest_block());
  for (size_t first = 0; first < segments; first += kColumnSegments) {
    const size_t end = std::min(first + kColumnSegments, segments);
    for (int round = 0; round < size(); ++round) {
      for (size_t index = first; index < end; ++index) reduce_scatter_segment(round, index, result);
    }
  }
}

// Round t sends block rank-1-t and receives block rank-2-t, so that the last one received is our own.
// Round p-1 only finishes what the round before received.
void Planner::reduce_scatter_segment(int round, size_t index, Place::Kind result) {
  const int sent = modulo(rank() - 1 - round);
  const int received = modulo(rank() - 2 - round);
  const Range out = block_segment(sent, index);
  const Range in = block_segment(received, index);
  const Place departs = partial(round + 1, sent, out.begin);  // what round-1 received, in the other half
  if (round == 0) {
    local(RingStep::Kind::kBegin, out.elements, departs, input(out.begin));
  } else {
    finish_or_add(round - 1, index, result);
  }
  if (round == size() - 1) return;
  send(next(), out.elements, departs);
  receive(previous(), in.elements, partial(round, received, in.begin));
}

// Round t sends block rank-t and receives block rank-t-1; we hold block `rank` before.
void Planner::all_gather_blocks() {
  for (int round = 0; round < size() - 1; ++round) {
    for (size_t index = 0; index < segments_of(longest_block()); ++index) {
      const Range out = block_segment(modulo(rank() - round), index);
      const Range in = block_segment(modulo(rank() - round - 1), index);
      receive(previous(), in.elements, output(in.begin));
      send(next(), out.elements, output(out.begin));
    }
  }
}

// Everybody's finished block goes to the root.
void Planner::gather_blocks() {
  for (size_t index = 0; index < segments_of(longest_block()); ++index) {
    if (rank() != request_.root) {
      const Range out = block_segment(rank(), index);
      send(request_.root, out.elements, {Place::Kind::kResult, 0, out.begin - block_begin(rank())});
      continue;
    }
    for (int peer = 0; peer < size(); ++peer) {
      const Range in = block_segment(peer, index);
      if (peer != rank()) receive(peer, in.elements, output(in.begin));
    }
  }
}

}  // namespace

RingPlan plan_ring_all_reduce(const RingRequest& request) {
  Planner planner(request);
  if (request.size == 1) {
    planner.local(RingStep::Kind::kCopy, request.count, output(0), input(0));
    return std::move(planner.plan);
  }
  planner.reduce_scatter(Place::Kind::kOutput);
  planner.all_gather_blocks();
  return std::move(planner.plan);
}

RingPlan plan_ring_reduce(const RingRequest& request) {
  if (request.size == 1) return plan_ring_all_reduce(request);
  Planner planner(request);
  planner.reduce_scatter(request.rank == request.root ? Place::Kind::kOutput : Place::Kind::kResult);
  planner.gather_blocks();
  return std::move(planner.plan);
}

// Here each rank's whole input is one block, and outputs are one per rank.
RingPlan plan_ring_all_gather(const RingRequest& request) {
  Planner planner(request);
  const Range whole{0, request.count};
  planner.local(RingStep::Kind::kCopy, request.count, output(0, request.rank), input(0));
  for (int round = 0; round < request.size - 1; ++round) {
    for (size_t index = 0; index < planner.segments_of(request.count); ++index) {
      const Range part = planner.segment(whole, index);
      const int sent = planner.modulo(request.rank - round);
      const int received = planner.modulo(request.rank - round - 1);
      planner.receive(planner.previous(), part.elements, output(part.begin, received));
      planner.send(planner.next(), part.elements, output(part.begin, sent));
    }
  }
  return std::move(planner.plan);
}

RingPlan plan_chain_broadcast(const RingRequest& request) {
  Planner planner(request);
  const bool first = request.rank == request.root;
  const bool last = planner.next() == request.root;
  const Range whole{0, request.count};
  const size_t segments = planner.segments_of(request.count);
  const auto receive = [&](size_t index) {
    const Range part = planner.segment(whole, index);
    if (!first) planner.receive(planner.previous(), part.elements, output(part.begin));
  };
  receive(0);
  for (size_t index = 0; index < segments; ++index) {
    receive(index + 1);  // before the send, which waits for its own segment
    const Range part = planner.segment(whole, index);
    if (!last) planner.send(planner.next(), part.elements, first ? input(part.begin) : output(part.begin));
  }
  if (first) planner.local(RingStep::Kind::kCopy, request.count, output(0), input(0));
  return std::move(planner.plan);
}

}  // namespace procgroup
