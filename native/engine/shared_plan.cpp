#include "engine/shared_plan.hpp"

#include "algorithms/piece_plan.hpp"
#include "algorithms/reading_plan.hpp"
#include "algorithms/slot_plan.hpp"
#include "engine/lending.hpp"
#include "engine/sheet.hpp"

namespace procgroup {
namespace {

// What is read at a time, and checked afterwards. What a rank has written leaves its second-level cache before a
// stretch ends: the peer reads it faster from the third level (all_reduce of 4 MiB in arenas on 2 ranks: 312 us; 390 in
// stretches of 1 MiB).
constexpr size_t kStretchBytes = size_t{4} << 20;

void plan_all_reduce(SharedState& state, SlotPlanRequest wanted) {
  if (state.size() == 2 && wanted.bytes >= state.exchanged_bytes) {
    wanted.chunk_bytes = 2 * state.layout.slot_bytes;
    plan_all_reduce_exchanged(wanted, state.plan);
  } else if (state.size() == 2 || wanted.bytes <= state.direct_bytes) {
    plan_all_reduce_direct(wanted, state.plan);
  } else {
    plan_all_reduce_scattered(wanted, state.plan);
  }
}

// What every rank has for every other. All ranks fill in the same table, from what they agreed upon.
void fill_pieces(SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const size_t element = dtype_size(call.dtype);
  state.pieces.reset(state.size(), call.bytes());
  for (int from = 0; from < state.size(); ++from) {
    for (int to = 0; to < state.size(); ++to) {
      size_t& bytes = state.pieces.between(from, to);
      if (call.op == OpKind::kAllGather) bytes = request.outputs[static_cast<size_t>(from)].count * element;
      if (call.op == OpKind::kReduceScatter) bytes = request.inputs[static_cast<size_t>(to)].count * element;
      if (call.op == OpKind::kAllToAll) bytes = state.counts.between(from, to) * element;
    }
  }
}

void plan_pieces(SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const PiecePlanRequest wanted{.rank = state.rank,
                                .size = state.size(),
                                .pieces = state.pieces,
                                .element_bytes = dtype_size(call.dtype),
                                .chunk_bytes = state.layout.chunk_bytes,
                                .root = call.root,
                                .earlier_chunks = state.chunks};
  switch (call.op) {
    case OpKind::kGather:
      return plan_gather(wanted, state.plan);
    case OpKind::kAllGather:
      return plan_all_gather(wanted, state.plan);
    case OpKind::kScatter:
      return plan_scatter(wanted, state.plan);
    case OpKind::kReduceScatter:
      return plan_reduce_scatter(wanted, state.plan);
    case OpKind::kAllToAll:
      return plan_all_to_all(wanted, state.plan);
    default:
      state.plan.clear();
  }
}

void plan_reading(SharedState& state, const Descriptor& call) {
  const ReadingPlanRequest wanted{.rank = state.rank,
                                  .size = state.size(),
                                  .pieces = state.pieces,
                                  .element_bytes = dtype_size(call.dtype),
                                  .stretch_bytes = kStretchBytes,
                                  .root = call.root};
  switch (call.op) {
    case OpKind::kBroadcast:
      return plan_reading_broadcast(wanted, state.plan);
    case OpKind::kReduce:
      return plan_reading_reduce(wanted, state.plan);
    case OpKind::kAllReduce:
      return plan_reading_all_reduce(wanted, state.plan);
    case OpKind::kGather:
      return plan_reading_gather(wanted, state.plan);
    case OpKind::kScatter:
      return plan_reading_scatter(wanted, state.plan);
    case OpKind::kReduceScatter:
      return plan_reading_reduce_scatter(wanted, state.plan);
    default:
      return plan_reading_all_to_all(wanted, has_input_pieces(call.op), state.plan);
  }
}

// How much this rank copies into its outputs. In an all_reduce it makes its own segment itself.
size_t copied_bytes(const SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (call.op == OpKind::kAllReduce) return call.bytes() - call.bytes() / static_cast<size_t>(state.size());
  if (request.outputs.empty()) return call.bytes();
  size_t count = 0;
  for (const Piece& piece : request.outputs) count += piece.count;
  return count * dtype_size(call.dtype);
}

void plan_slots(SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  // An all_reduce in place overwrites what it has just read: that is in the caches already.
  state.streams = call.op != OpKind::kAllReduce && copied_bytes(state, request) >= kStreamedBytes;
  const SlotPlanRequest wanted{.rank = state.rank,
                               .size = state.size(),
                               .bytes = call.bytes(),
                               .element_bytes = dtype_size(call.dtype),
                               .chunk_bytes = state.layout.chunk_bytes,
                               .root = call.root,
                               .earlier_chunks = state.chunks};
  switch (call.op) {
    case OpKind::kAllReduce:
      return plan_all_reduce(state, wanted);
    case OpKind::kBroadcast:
      return plan_broadcast(wanted, state.plan);
    case OpKind::kReduce:
      return plan_reduce(wanted, state.plan);
    default:
      return plan_pieces(state, request);
  }
}

}  // namespace

bool make_plan_early(SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (call.op == OpKind::kAllToAll) return false;  // others' sheets say how much
  fill_pieces(state, request);
  if (may_be_read(state, call, state.pieces.largest())) return false;
  plan_slots(state, request);
  return true;
}

void make_plan(SharedState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  fill_pieces(state, request);
  if (!all_read(state, call, state.pieces.largest())) return plan_slots(state, request);
  state.streams = copied_bytes(state, request) >= kStreamedBytes;
  plan_reading(state, call);
}

}  // namespace procgroup
