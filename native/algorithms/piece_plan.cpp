#include "algorithms/piece_plan.hpp"

#include <algorithm>

#include "transport/group_memory.hpp"

namespace procgroup {
namespace {

constexpr size_t kCacheLine = 64;

// Writes steps in the words of the header's essay.
class PiecePlanner : public PlanWriter {
 public:
  // `largest`: how much all rounds together move at most between two ranks.
  PiecePlanner(const PiecePlanRequest& request, Plan& plan, int lanes, size_t largest)
      : PlanWriter(plan), request_(request), part_(lane_bytes(request, lanes)) {
    plan_.chunks = rounds_for(largest);
  }
  PiecePlanner(const PiecePlanRequest& request, Plan& plan, int lanes)
      : PiecePlanner(request, plan, lanes, request.pieces.largest()) {}

  uint64_t rounds() const { return plan_.chunks; }
  uint64_t rounds_for(size_t bytes) const { return bytes / part_ + (bytes % part_ != 0 ? 1 : 0); }
  // The part of the piece between two ranks that one round moves; none when the piece is shorter.
  size_t length(uint64_t round, int from, int to) const {
    const size_t bytes = request_.pieces.between(from, to);
    return std::min(part_, bytes - std::min(bytes, start(round)));
  }
  Place input(uint64_t round, int piece = 0) const {
    return {.kind = Place::Kind::kInput, .rank = piece, .offset = start(round)};
  }
  Place output(uint64_t round, int piece = 0) const {
    return {.kind = Place::Kind::kOutput, .rank = piece, .offset = start(round)};
  }
  Place slot(uint64_t round, int rank, int lane = 0) const {
    return {.kind = Place::Kind::kSlot,
            .slot = static_cast<int8_t>((request_.earlier_chunks + round) % kSlots),
            .rank = rank,
            .offset = static_cast<size_t>(lane) * part_};
  }
  // The others, beginning with the next rank, so that not everybody reads the same slots at once.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int step = 1; step < request_.size; ++step) visit((request_.rank + step) % request_.size);
  }
  // My own piece goes from input to output, whole.
  void keep_own(int input_piece, int output_piece) {
    copy(output(0, output_piece), input(0, input_piece), request_.pieces.between(request_.rank, request_.rank));
  }

 private:
  size_t start(uint64_t round) const { return round * part_; }
  static size_t lane_bytes(const PiecePlanRequest& request, int lanes) {
    const size_t room = request.chunk_bytes / static_cast<size_t>(lanes);
    if (room >= kCacheLine) return room / kCacheLine * kCacheLine;
    return std::max(room / request.element_bytes, size_t{1}) * request.element_bytes;
  }

  const PiecePlanRequest& request_;
  size_t part_;
};

// Which lane of `owner`'s slot is for `reader`: the next rank's is the first.
int lane_for(int reader, int owner, int size) { return (reader - owner - 1 + size) % size; }

int lanes_for_others(int size) { return std::max(size - 1, 1); }

}  // namespace

// Deposit k overwrites round k-4 (four slots): everybody has published k, and so is done with round k-2.
void plan_all_gather(const PiecePlanRequest& request, Plan& plan) {
  PiecePlanner planner(request, plan, 1);
  for (uint64_t round = 0; round < planner.rounds(); ++round) {
    const size_t own = planner.length(round, request.rank, request.rank);
    planner.copy(planner.slot(round, request.rank), planner.input(round), own);
    planner.publish(round + 1);
    planner.copy(planner.output(round, request.rank), planner.input(round), own);
    planner.for_each_peer([&](int peer) {
      planner.await(peer, round + 1);
      planner.copy(planner.output(round, peer), planner.slot(round, peer), planner.length(round, peer, request.rank));
    });
  }
}

// A sender's value k+1: round k lies in its slot. The root's: it has collected round k. Before a sender overwrites
// round k-4 it awaits the root's k-3.
void plan_gather(const PiecePlanRequest& request, Plan& plan) {
  PiecePlanner planner(request, plan, 1);
  const bool is_root = request.rank == request.root;
  if (is_root) planner.keep_own(0, request.rank);
  for (uint64_t round = 0; round < planner.rounds(); ++round) {
    if (is_root) {
      planner.for_each_peer([&](int peer) {
        planner.await(peer, round + 1);
        planner.copy(planner.output(round, peer), planner.slot(round, peer), planner.length(round, peer, request.rank));
      });
    } else {
      if (round >= kSlots) planner.await(request.root, round - kSlots + 1);
      planner.copy(planner.slot(round, request.rank), planner.input(round),
                   planner.length(round, request.rank, request.root));
    }
    planner.publish(round + 1);
  }
}

// The root's value k+1: round k lies in its lanes. A reader's value k+1: it has collected its part of round k. Before
// the root overwrites round k-4 it awaits everybody's k-3.
void plan_scatter(const PiecePlanRequest& request, Plan& plan) {
  PiecePlanner planner(request, plan, lanes_for_others(request.size));
  const bool is_root = request.rank == request.root;
  if (is_root) planner.keep_own(request.rank, 0);
  for (uint64_t round = 0; round < planner.rounds(); ++round) {
    if (is_root) {
      if (round >= kSlots) planner.await(kEveryone, round - kSlots + 1);
      planner.for_each_peer([&](int peer) {
        planner.copy(planner.slot(round, request.rank, lane_for(peer, request.rank, request.size)),
                     planner.input(round, peer), planner.length(round, request.rank, peer));
      });
    } else {
      planner.await(request.root, round + 1);
      planner.copy(planner.output(round),
                   planner.slot(round, request.root, lane_for(request.rank, request.root, request.size)),
                   planner.length(round, request.root, request.rank));
    }
    planner.publish(round + 1);
  }
}

// Slots are overwritten as in all_gather. All sources of a reduction lie at one offset of their slots: above two ranks
// lanes are numbered by receiver, and a rank leaves its own empty.
void plan_reduce_scatter(const PiecePlanRequest& request, Plan& plan) {
  PiecePlanner planner(request, plan, request.size == 2 ? 1 : request.size);
  const auto lane = [&](int reader) { return request.size == 2 ? 0 : reader; };
  for (uint64_t round = 0; round < planner.rounds(); ++round) {
    planner.for_each_peer([&](int peer) {
      planner.copy(planner.slot(round, request.rank, lane(peer)), planner.input(round, peer),
                   planner.length(round, request.rank, peer));
    });
    planner.publish(round + 1);
    planner.await(kEveryone, round + 1);
    planner.reduce(planner.output(round), planner.slot(round, request.rank, lane(request.rank)),
                   planner.input(round, request.rank), planner.length(round, request.rank, request.rank));
  }
}

// Slots are overwritten as in all_gather: a rank awaits everybody in every round up to the last in which it gives or
// gets anything. Then it publishes all rounds at once, since it neither writes nor reads a slot in the rest of them: so
// its plan is as long as its own pieces, however much the others say that they move.
void plan_all_to_all(const PiecePlanRequest& request, Plan& plan) {
  PiecePlanner planner(request, plan, lanes_for_others(request.size), request.pieces.largest_moved());
  planner.keep_own(request.rank, request.rank);
  const uint64_t own_rounds = planner.rounds_for(request.pieces.largest_moved(request.rank));
  for (uint64_t round = 0; round < own_rounds; ++round) {
    planner.for_each_peer([&](int peer) {
      planner.copy(planner.slot(round, request.rank, lane_for(peer, request.rank, request.size)),
                   planner.input(round, peer), planner.length(round, request.rank, peer));
    });
    planner.publish(round + 1);
    planner.for_each_peer([&](int peer) {
      planner.await(peer, round + 1);
      planner.copy(planner.output(round, peer), planner.slot(round, peer, lane_for(request.rank, peer, request.size)),
                   planner.length(round, peer, request.rank));
    });
  }
  if (own_rounds < planner.rounds()) planner.publish(planner.rounds());
}

}  // namespace procgroup
