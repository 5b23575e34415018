#include "algorithms/reading_plan.hpp"

#include <algorithm>

namespace procgroup {
namespace {

constexpr Place input(int piece, size_t offset = 0) {
  return {.kind = Place::Kind::kInput, .rank = piece, .offset = offset};
}
constexpr Place output(int piece, size_t offset = 0) {
  return {.kind = Place::Kind::kOutput, .rank = piece, .offset = offset};
}

class ReadingPlanner : public PlanWriter {
 public:
  ReadingPlanner(const ReadingPlanRequest& request, Plan& plan)
      : PlanWriter(plan),
        request_(request),
        stretch_(std::max(request.stretch_bytes / request.element_bytes, size_t{1}) * request.element_bytes) {}

  size_t stretch() const { return stretch_; }
  void keep_own(int input_piece, int output_piece) {
    copy(output(output_piece), input(input_piece), request_.pieces.between(request_.rank, request_.rank));
  }
  void collect(int peer, int output_piece) {
    in_stretches(request_.pieces.between(peer, request_.rank), [&](size_t offset, size_t bytes) {
      read(output(output_piece, offset), {.kind = Place::Kind::kPeerInput, .rank = peer, .offset = offset}, bytes);
    });
  }
  // All ranks' pieces for this rank become its output.
  void combine(int own_piece) {
    in_stretches(request_.pieces.between(request_.rank, request_.rank), [&](size_t offset, size_t bytes) {
      read_reduce(output(0, offset), {.kind = Place::Kind::kPeerInput, .offset = offset}, input(own_piece, offset),
                  bytes);
    });
  }
  // Say that this rank has read what it needs.
  void acknowledge() { publish(plan_.published + 1); }

  template <class Visit>
  void in_stretches(size_t bytes, Visit visit) const {
    for (size_t offset = 0; offset < bytes; offset += stretch_) visit(offset, std::min(stretch_, bytes - offset));
  }
  // The others, beginning with the next rank, so that not everybody reads the same array at once.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int step = 1; step < request_.size; ++step) visit((request_.rank + step) % request_.size);
  }

 private:
  const ReadingPlanRequest& request_;
  size_t stretch_;
};

struct Segment {
  size_t offset;
  size_t bytes;
};

// The part of a stretch that `rank` reduces: whole elements, the first ranks take one more.
Segment segment(const ReadingPlanRequest& request, size_t offset, size_t bytes, int rank) {
  const size_t elements = bytes / request.element_bytes;
  const size_t size = static_cast<size_t>(request.size);
  const size_t index = static_cast<size_t>(rank);
  const size_t first = elements / size * index + std::min(elements % size, index);
  const size_t count = elements / size + (index < elements % size ? 1 : 0);
  return {offset + first * request.element_bytes, count * request.element_bytes};
}

}  // namespace

void plan_reading_broadcast(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  if (request.rank != request.root) planner.collect(request.root, 0);
  planner.acknowledge();
  if (request.rank == request.root) planner.await(kEveryone, 1);
}

void plan_reading_reduce(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  if (request.rank == request.root) planner.combine(0);
  planner.acknowledge();
  if (request.rank != request.root) planner.await(request.root, 1);
}

void plan_reading_all_reduce(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  uint64_t done = 0;
  planner.in_stretches(request.pieces.between(request.rank, request.rank), [&](size_t offset, size_t bytes) {
    const Segment mine = segment(request, offset, bytes, request.rank);
    planner.read_reduce(output(0, mine.offset), {.kind = Place::Kind::kPeerInput, .offset = mine.offset},
                        input(0, mine.offset), mine.bytes);
    planner.publish(++done);
    planner.for_each_peer([&](int peer) {
      const Segment theirs = segment(request, offset, bytes, peer);
      planner.await(peer, done);
      planner.read(output(0, theirs.offset), {.kind = Place::Kind::kPeerOutput, .rank = peer, .offset = theirs.offset},
                   theirs.bytes);
    });
  });
  planner.acknowledge();
  planner.await(kEveryone, done + 1);
}

void plan_reading_gather(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  if (request.rank == request.root) {
    planner.keep_own(0, request.rank);
    planner.for_each_peer([&](int peer) { planner.collect(peer, peer); });
  }
  planner.acknowledge();
  if (request.rank != request.root) planner.await(request.root, 1);
}

void plan_reading_scatter(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  if (request.rank == request.root)
    planner.keep_own(request.rank, 0);
  else
    planner.collect(request.root, 0);
  planner.acknowledge();
  if (request.rank == request.root) planner.await(kEveryone, 1);
}

void plan_reading_all_to_all(const ReadingPlanRequest& request, bool inputs, Plan& plan) {
  ReadingPlanner planner(request, plan);
  planner.for_each_peer([&](int peer) { planner.collect(peer, peer); });
  planner.acknowledge();
  planner.keep_own(inputs ? request.rank : 0, request.rank);
  planner.await(kEveryone, 1);
}

void plan_reading_reduce_scatter(const ReadingPlanRequest& request, Plan& plan) {
  ReadingPlanner planner(request, plan);
  planner.combine(request.rank);
  planner.acknowledge();
  planner.await(kEveryone, 1);
}

}  // namespace procgroup
