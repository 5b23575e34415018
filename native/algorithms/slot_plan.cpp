#include "algorithms/slot_plan.hpp"

#include <algorithm>

namespace procgroup {
namespace {

// Writes steps in the words of the header's essay.
class Planner {
 public:
  Planner(const SlotPlanRequest& request, SlotPlan& plan)
      : request_(request),
        plan_(plan),
        chunk_(std::max(request.chunk_bytes / request.element_bytes, size_t{1}) * request.element_bytes) {
    plan_.clear();
  }

  uint64_t chunks() const { return (request_.bytes + chunk_ - 1) / chunk_; }
  size_t start(uint64_t chunk) const { return chunk * chunk_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_, request_.bytes - start(chunk)); }

  void copy(Place to, Place from, size_t bytes) {
    if (bytes != 0) plan_.steps.push_back({.kind = Step::Kind::kCopy, .bytes = bytes, .to = to, .from = from});
  }
  void reduce(Place to, Place from, size_t bytes) {
    if (bytes != 0) plan_.steps.push_back({.kind = Step::Kind::kReduce, .bytes = bytes, .to = to, .from = from});
  }
  void publish(uint64_t value) {
    plan_.steps.push_back({.kind = Step::Kind::kPublish, .value = value});
    plan_.published = value;
  }
  void await(int rank, uint64_t value) {
    plan_.steps.push_back({.kind = Step::Kind::kAwait, .rank = rank, .value = value});
  }

  Place input(uint64_t chunk) const { return {.kind = Place::Kind::kInput, .offset = start(chunk)}; }
  Place output(uint64_t chunk, int rank = 0) const {
    return {.kind = Place::Kind::kOutput, .rank = rank, .offset = start(chunk)};
  }
  static Place slot(uint64_t index, int rank, size_t offset = 0) {
    return {.kind = Place::Kind::kSlot, .slot = static_cast<int8_t>(index), .rank = rank, .offset = offset};
  }
  void deposit(uint64_t chunk, uint64_t slots) {
    copy(slot(chunk % slots, request_.rank), input(chunk), length(chunk));
  }

  // The part of a chunk that `rank` reduces: whole elements, the first ranks take one more.
  struct Segment {
    size_t offset;
    size_t bytes;
  };
  Segment segment(uint64_t chunk, int rank) const {
    const size_t elements = length(chunk) / request_.element_bytes;
    const size_t size = static_cast<size_t>(request_.size);
    const size_t index = static_cast<size_t>(rank);
    const size_t first = elements / size * index + std::min(elements % size, index);
    const size_t count = elements / size + (index < elements % size ? 1 : 0);
    return {first * request_.element_bytes, count * request_.element_bytes};
  }

 private:
  const SlotPlanRequest& request_;
  SlotPlan& plan_;
  size_t chunk_;
};

// Deposits run one chunk ahead. Deposit k+1 overwrites chunk k-3 (four slots): I have awaited value k,
// which a rank publishes only after it is done with chunk k-3.
template <class Consume>
void plan_direct(const SlotPlanRequest& request, SlotPlan& plan, Consume consume) {
  Planner planner(request, plan);
  const uint64_t chunks = planner.chunks();
  if (chunks == 0) return;
  planner.deposit(0, kSlots);
  planner.publish(1);
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      planner.deposit(chunk + 1, kSlots);
      planner.publish(chunk + 2);
    }
    consume(planner, chunk);
  }
}

}  // namespace

void plan_all_reduce_direct(const SlotPlanRequest& request, SlotPlan& plan) {
  plan_direct(request, plan, [&](Planner& planner, uint64_t chunk) {
    planner.await(kEveryone, chunk + 1);
    planner.reduce(planner.output(chunk), Planner::slot(chunk % kSlots, request.rank), planner.length(chunk));
  });
}

void plan_all_gather(const SlotPlanRequest& request, SlotPlan& plan) {
  plan_direct(request, plan, [&](Planner& planner, uint64_t chunk) {
    planner.copy(planner.output(chunk, request.rank), planner.input(chunk), planner.length(chunk));
    // Start with the next rank, so that not everybody reads the same slots at once.
    for (int step = 1; step < request.size; ++step) {
      const int peer = (request.rank + step) % request.size;
      planner.await(peer, chunk + 1);
      planner.copy(planner.output(chunk, peer), Planner::slot(chunk % kSlots, peer), planner.length(chunk));
    }
  });
}

// Slots 0 and 1 take deposits, 2 and 3 results, in turn. Value k+1 says: reduced my segment of chunk k-1,
// collected chunk k-2, deposited chunk k. Deposit k+1 overwrites chunk k-1: everybody published k+1, so
// all have reduced it. Result k overwrites result k-2: for the same reason all have collected that.
void plan_all_reduce_scattered(const SlotPlanRequest& request, SlotPlan& plan) {
  Planner planner(request, plan);
  const uint64_t chunks = planner.chunks();
  if (chunks == 0) return;
  const auto collect = [&](uint64_t chunk) {
    for (int step = 0; step < request.size; ++step) {
      const int peer = (request.rank + step) % request.size;
      const auto [offset, bytes] = planner.segment(chunk, peer);
      Place to = planner.output(chunk);
      to.offset += offset;
      planner.copy(to, Planner::slot(2 + chunk % 2, peer), bytes);
    }
  };
  planner.deposit(0, 2);
  planner.publish(1);
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    planner.await(kEveryone, chunk + 1);
    const auto [offset, bytes] = planner.segment(chunk, request.rank);
    planner.reduce(Planner::slot(2 + chunk % 2, request.rank), Planner::slot(chunk % 2, request.rank, offset), bytes);
    if (chunk + 1 < chunks) planner.deposit(chunk + 1, 2);
    if (chunk > 0) collect(chunk - 1);
    planner.publish(chunk + 2);
  }
  planner.await(kEveryone, chunks + 1);
  collect(chunks - 1);
}

// The root's value k+1: chunk k lies in its slot. A reader's value k+1: it has collected chunk k. Before the
// root overwrites chunk k-4 it awaits everybody's k-3.
void plan_broadcast(const SlotPlanRequest& request, SlotPlan& plan) {
  Planner planner(request, plan);
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    if (request.rank == request.root) {
      if (chunk >= kSlots) planner.await(kEveryone, chunk - kSlots + 1);
      planner.deposit(chunk, kSlots);
    } else {
      planner.await(request.root, chunk + 1);
      planner.copy(planner.output(chunk), Planner::slot(chunk % kSlots, request.root), planner.length(chunk));
    }
    planner.publish(chunk + 1);
  }
}

// A sender's value k+1: chunk k lies in its slot. The root's: it has reduced chunk k. Before a sender
// overwrites chunk k-4 it awaits the root's k-3.
void plan_reduce(const SlotPlanRequest& request, SlotPlan& plan) {
  Planner planner(request, plan);
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    const bool is_root = request.rank == request.root;
    if (!is_root && chunk >= kSlots) planner.await(request.root, chunk - kSlots + 1);
    planner.deposit(chunk, kSlots);
    if (is_root) {
      for (int step = 1; step < request.size; ++step) planner.await((request.rank + step) % request.size, chunk + 1);
      planner.reduce(planner.output(chunk), Planner::slot(chunk % kSlots, request.rank), planner.length(chunk));
    }
    planner.publish(chunk + 1);
  }
}

}  // namespace procgroup
