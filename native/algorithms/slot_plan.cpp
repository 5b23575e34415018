#include "algorithms/slot_plan.hpp"

#include <algorithm>

#include "transport/group_memory.hpp"

namespace procgroup {
namespace {

// Writes steps in the words of the header's essay.
class Planner : public PlanWriter {
 public:
  Planner(const SlotPlanRequest& request, Plan& plan)
      : PlanWriter(plan),
        request_(request),
        chunk_(std::max(request.chunk_bytes / request.element_bytes, size_t{1}) * request.element_bytes) {
    plan_.chunks = (request.bytes + chunk_ - 1) / chunk_;
  }

  uint64_t chunks() const { return plan_.chunks; }
  size_t start(uint64_t chunk) const { return chunk * chunk_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_, request_.bytes - start(chunk)); }

  Place input(uint64_t chunk) const { return {.kind = Place::Kind::kInput, .offset = start(chunk)}; }
  Place output(uint64_t chunk) const { return {.kind = Place::Kind::kOutput, .offset = start(chunk)}; }
  // Where `rank` deposits a chunk: slots 0 to `slots` - 1 in turn.
  Place deposited(uint64_t chunk, int rank, uint64_t slots, size_t offset = 0) const {
    return in_slot((request_.earlier_chunks + chunk) % slots, rank, offset);
  }
  // Where `rank` puts its part of a chunk's result: slots 2 and 3 in turn.
  Place result(uint64_t chunk, int rank) const { return in_slot(2 + (request_.earlier_chunks + chunk) % 2, rank, 0); }
  void deposit(uint64_t chunk, uint64_t slots) {
    copy(deposited(chunk, request_.rank, slots), input(chunk), length(chunk));
  }
  // All of a chunk but the segment that this rank reduces itself.
  void deposit_for_others(uint64_t chunk, uint64_t slots) {
    const auto [offset, bytes] = segment(chunk, request_.rank);
    const Place to = deposited(chunk, request_.rank, slots);
    copy(to, input(chunk), offset);
    copy(moved(to, offset + bytes), moved(input(chunk), offset + bytes), length(chunk) - offset - bytes);
  }
  static Place moved(Place place, size_t offset) {
    place.offset += offset;
    return place;
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
  static Place in_slot(uint64_t index, int rank, size_t offset) {
    return {.kind = Place::Kind::kSlot, .slot = static_cast<int8_t>(index), .rank = rank, .offset = offset};
  }

  const SlotPlanRequest& request_;
  size_t chunk_;
};

}  // namespace

// Deposit k overwrites chunk k-4 (four slots): everybody has published k, and so is done with chunk k-2.
void plan_all_reduce_direct(const SlotPlanRequest& request, Plan& plan) {
  Planner planner(request, plan);
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    planner.deposit(chunk, kSlots);
    planner.publish(chunk + 1);
    planner.await(kEveryone, chunk + 1);
    planner.reduce(planner.output(chunk), planner.deposited(chunk, request.rank, kSlots), planner.input(chunk),
                   planner.length(chunk));
  }
}

// Slots 0 and 1 take deposits, 2 and 3 results, in turn. Value k+1 says: reduced my segment of chunk k-1,
// collected chunk k-2, deposited chunk k. Deposit k+1 overwrites chunk k-1: everybody published k+1, so
// all have reduced it. Result k overwrites result k-2: for the same reason all have collected that.
void plan_all_reduce_scattered(const SlotPlanRequest& request, Plan& plan) {
  Planner planner(request, plan);
  const uint64_t chunks = planner.chunks();
  if (chunks == 0) return;
  const auto collect = [&](uint64_t chunk) {
    for (int step = 1; step < request.size; ++step) {
      const int peer = (request.rank + step) % request.size;
      const auto [offset, bytes] = planner.segment(chunk, peer);
      planner.copy(Planner::moved(planner.output(chunk), offset), planner.result(chunk, peer), bytes);
    }
  };
  planner.deposit_for_others(0, 2);
  planner.publish(1);
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    planner.await(kEveryone, chunk + 1);
    const auto [offset, bytes] = planner.segment(chunk, request.rank);
    planner.reduce(Planner::moved(planner.output(chunk), offset), planner.deposited(chunk, request.rank, 2, offset),
                   Planner::moved(planner.input(chunk), offset), bytes);
    planner.share_result(planner.result(chunk, request.rank), bytes);
    if (chunk + 1 < chunks) planner.deposit_for_others(chunk + 1, 2);
    if (chunk > 0) collect(chunk - 1);
    planner.publish(chunk + 2);
  }
  planner.await(kEveryone, chunks + 1);
  collect(chunks - 1);
}

// Each rank deposits the half of a chunk that the other reduces (value 2k+1), reduces its own half into its
// output and a slot (2k+2), and collects the other's. Slots 0 and 1 take deposits, 2 and 3 results, in turn:
// what chunk k overwrites is of chunk k-2, with which the other was done when it published 2k-1.
void plan_all_reduce_exchanged(const SlotPlanRequest& request, Plan& plan) {
  Planner planner(request, plan);
  const int peer = 1 - request.rank;
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    const auto mine = planner.segment(chunk, request.rank);
    const auto theirs = planner.segment(chunk, peer);
    planner.copy(planner.deposited(chunk, request.rank, 2), Planner::moved(planner.input(chunk), theirs.offset),
                 theirs.bytes);
    planner.publish(2 * chunk + 1);
    planner.await(peer, 2 * chunk + 1);
    planner.reduce(Planner::moved(planner.output(chunk), mine.offset), planner.deposited(chunk, request.rank, 2),
                   Planner::moved(planner.input(chunk), mine.offset), mine.bytes);
    planner.share_result(planner.result(chunk, request.rank), mine.bytes);
    planner.publish(2 * chunk + 2);
    planner.await(peer, 2 * chunk + 2);
    planner.copy(Planner::moved(planner.output(chunk), theirs.offset), planner.result(chunk, peer), theirs.bytes);
  }
}

// The root's value k+1: chunk k lies in its slot. A reader's value k+1: it has collected chunk k. Before the
// root overwrites chunk k-4 it awaits everybody's k-3.
void plan_broadcast(const SlotPlanRequest& request, Plan& plan) {
  Planner planner(request, plan);
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    if (request.rank == request.root) {
      if (chunk >= kSlots) planner.await(kEveryone, chunk - kSlots + 1);
      planner.deposit(chunk, kSlots);
    } else {
      planner.await(request.root, chunk + 1);
      planner.copy(planner.output(chunk), planner.deposited(chunk, request.root, kSlots), planner.length(chunk));
    }
    planner.publish(chunk + 1);
  }
}

// A sender's value k+1: chunk k lies in its slot. The root's: it has reduced chunk k. Before a sender
// overwrites chunk k-4 it awaits the root's k-3.
void plan_reduce(const SlotPlanRequest& request, Plan& plan) {
  Planner planner(request, plan);
  for (uint64_t chunk = 0; chunk < planner.chunks(); ++chunk) {
    const bool is_root = request.rank == request.root;
    if (!is_root && chunk >= kSlots) planner.await(request.root, chunk - kSlots + 1);
    if (!is_root) planner.deposit(chunk, kSlots);
    if (is_root) {
      for (int step = 1; step < request.size; ++step) planner.await((request.rank + step) % request.size, chunk + 1);
      planner.reduce(planner.output(chunk), planner.deposited(chunk, request.rank, kSlots), planner.input(chunk),
                     planner.length(chunk));
    }
    planner.publish(chunk + 1);
  }
}

}  // namespace procgroup
