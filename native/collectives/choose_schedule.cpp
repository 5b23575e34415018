#include "collectives/choose_schedule.hpp"

#include <algorithm>
#include <vector>

#include "collectives/block_counts.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"
#include "dtype/partial.hpp"
#include "schedules/schedule.hpp"

namespace procgroup {
namespace {

// What every rank has for every other. All ranks fill in the same table, from what they agreed upon.
void fill_blocks(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const size_t element = dtype_size(call.dtype);
  const Sizes sizes = row_of(call.op).sizes;
  state.blocks.reset(state.size(), call.bytes());
  if (sizes == Sizes::kEqual) return;
  for (int from = 0; from < state.size(); ++from)
    for (int to = 0; to < state.size(); ++to)
      state.blocks.between(from, to) =
          element * (sizes == Sizes::kPerPair ? state.counts.between(from, to) : block_count(request, from, to));
}

ScheduleRequest request_for(const CollectiveState& state, const Descriptor& call) {
  return {.op = call.op,
          .rank = state.rank,
          .size = state.size(),
          .root = call.root,
          .element_bytes = dtype_size(call.dtype),
          .bytes = call.bytes(),
          .blocks = state.blocks,
          .chunk_bytes = state.layout.chunk_bytes,
          .earlier_chunks = state.chunks,
          .topology = state.topology};
}

const char* schedule_all_reduce(CollectiveState& state, ScheduleRequest wanted) {
  if (state.size() == 2 && wanted.bytes >= state.exchanged_bytes) {
    wanted.chunk_bytes = 2 * state.layout.slot_bytes;
    schedule_all_reduce_exchanged(wanted, state.schedule);
    return "exchanged";
  }
  if (state.size() == 2 || wanted.bytes <= state.direct_bytes) {
    schedule_slots(wanted, state.schedule);
    return "slots";
  }
  schedule_all_reduce_scattered(wanted, state.schedule);
  return "scattered";
}

// How much this rank copies into its outputs. In an all_reduce it makes its own segment itself.
size_t copied_bytes(const CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (call.op == OpKind::kAllReduce) return call.bytes() - call.bytes() / static_cast<size_t>(state.size());
  if (request.outputs.empty()) return call.bytes();
  size_t count = 0;
  for (const Block& block : request.outputs) count += block.count;
  return count * dtype_size(call.dtype);
}

const char* schedule_in_slots(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  // An all_reduce in place overwrites what it has just read: that is in the caches already.
  state.streams = call.op != OpKind::kAllReduce && copied_bytes(state, request) >= kStreamedBytes;
  const ScheduleRequest wanted = request_for(state, call);
  if (call.op == OpKind::kAllReduce) return schedule_all_reduce(state, wanted);
  const bool in_blocks = has_input_blocks(call.op) || has_output_blocks(call.op);
  (in_blocks ? schedule_blocks : schedule_slots)(wanted, state.schedule);
  return in_blocks ? "blocks" : "slots";
}

// A reduction by messages receives from all ranks at once: with many of them, in shorter segments, so that the scratch
// stays small, but not in such short ones that the messages are what costs.
constexpr size_t kReducedAtOnceBytes = size_t{1} << 20;
constexpr size_t kShortestSegmentBytes = 32 * 1024;

// Whether the ranks of each host may reduce among themselves first, and the hosts' results in a second step.
bool may_reduce_by_host(const Descriptor& call) {
  return !reduces(call.op) || (!call.ordered && has_partial_results(call.dtype, call.reduce_op));
}

const char* schedule_between_hosts(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  state.streams = false;
  ScheduleRequest wanted = request_for(state, call);
  size_t segment = state.messages->limits.segment_bytes;
  if (reduces(call.op)) {
    segment = std::min(segment, std::max(kShortestSegmentBytes, kReducedAtOnceBytes / state.members.size()));
    wanted.widening = partial_size(call.dtype, call.reduce_op) / wanted.element_bytes;
  }
  wanted.segment_bytes = std::max<size_t>(1, segment / wanted.element_bytes) * wanted.element_bytes;
  const bool by_host = has_hierarchical_schedule(call.op) && may_reduce_by_host(call) && !state.topology.is_flat();
  (by_host ? schedule_hierarchical : schedule_messages)(wanted, state.schedule);
  state.message_scratch.reserve(state.schedule.scratch_bytes);
  return by_host ? "hierarchical" : "messages";
}

const char* schedule_chosen(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (state.topology.spans_hosts()) return schedule_between_hosts(state, request);
  if (!all_read(state, call, state.blocks.largest())) return schedule_in_slots(state, request);
  state.streams = copied_bytes(state, request) >= kStreamedBytes;
  ScheduleRequest wanted = request_for(state, call);
  wanted.chunk_bytes = kReadInPlaceBytes;
  schedule_reading(wanted, state.schedule);
  return "read in place";
}

}  // namespace

bool make_schedule_early(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (is_by_pair(call.op)) return false;  // its sizes are known after the agreement only
  fill_blocks(state, request);
  if (may_be_read(state, call, state.blocks.largest())) return false;
  state.chosen = {call.sequence, schedule_in_slots(state, request)};
  return true;
}

void make_schedule(CollectiveState& state, const Request& request) {
  fill_blocks(state, request);
  state.chosen = {request.descriptor.sequence, schedule_chosen(state, request)};
}

}  // namespace procgroup
