#include "collectives/choose_schedule.hpp"

#include <algorithm>
#include <vector>

#include "collectives/block_counts.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"
#include "dtype/partial.hpp"
#include "schedules/block_schedules.hpp"
#include "schedules/hierarchical_schedules.hpp"
#include "schedules/message_schedules.hpp"
#include "schedules/single_copy_schedules.hpp"
#include "schedules/slot_schedules.hpp"

namespace procgroup {
namespace {

// What is read at a time, and checked afterwards. What a rank has written leaves its second-level cache before a
// chunk ends: the peer reads it faster from the third level (all_reduce of 4 MiB in arenas on 2 ranks: 312 us; 390 in
// chunks of 1 MiB).
constexpr size_t kChunkBytes = size_t{4} << 20;

void schedule_all_reduce(CollectiveState& state, SlotScheduleRequest wanted) {
  if (state.size() == 2 && wanted.bytes >= state.exchanged_bytes) {
    wanted.chunk_bytes = 2 * state.layout.slot_bytes;
    schedule_all_reduce_exchanged(wanted, state.schedule);
  } else if (state.size() == 2 || wanted.bytes <= state.direct_bytes) {
    schedule_all_reduce_direct(wanted, state.schedule);
  } else {
    schedule_all_reduce_scattered(wanted, state.schedule);
  }
}

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

void schedule_blocks(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const BlockScheduleRequest wanted{.rank = state.rank,
                                    .size = state.size(),
                                    .blocks = state.blocks,
                                    .element_bytes = dtype_size(call.dtype),
                                    .chunk_bytes = state.layout.chunk_bytes,
                                    .root = call.root,
                                    .earlier_chunks = state.chunks};
  switch (call.op) {
    case OpKind::kGather:
      return schedule_gather(wanted, state.schedule);
    case OpKind::kAllGather:
      return schedule_all_gather(wanted, state.schedule);
    case OpKind::kScatter:
      return schedule_scatter(wanted, state.schedule);
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(wanted, state.schedule);
    case OpKind::kAllToAll:
      return schedule_all_to_all(wanted, state.schedule);
    default:
      state.schedule.clear();
  }
}

void schedule_reading(CollectiveState& state, const Descriptor& call) {
  const SingleCopyScheduleRequest wanted{.rank = state.rank,
                                         .size = state.size(),
                                         .blocks = state.blocks,
                                         .element_bytes = dtype_size(call.dtype),
                                         .chunk_bytes = kChunkBytes,
                                         .root = call.root};
  switch (call.op) {
    case OpKind::kBroadcast:
      return schedule_reading_broadcast(wanted, state.schedule);
    case OpKind::kReduce:
      return schedule_reading_reduce(wanted, state.schedule);
    case OpKind::kAllReduce:
      return schedule_reading_all_reduce(wanted, state.schedule);
    case OpKind::kGather:
      return schedule_reading_gather(wanted, state.schedule);
    case OpKind::kScatter:
      return schedule_reading_scatter(wanted, state.schedule);
    case OpKind::kReduceScatter:
      return schedule_reading_reduce_scatter(wanted, state.schedule);
    default:
      return schedule_reading_all_to_all(wanted, has_input_blocks(call.op), state.schedule);
  }
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

void schedule_in_slots(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  // An all_reduce in place overwrites what it has just read: that is in the caches already.
  state.streams = call.op != OpKind::kAllReduce && copied_bytes(state, request) >= kStreamedBytes;
  const SlotScheduleRequest wanted{.rank = state.rank,
                                   .size = state.size(),
                                   .bytes = call.bytes(),
                                   .element_bytes = dtype_size(call.dtype),
                                   .chunk_bytes = state.layout.chunk_bytes,
                                   .root = call.root,
                                   .earlier_chunks = state.chunks};
  if (has_input_blocks(call.op) || has_output_blocks(call.op)) return schedule_blocks(state, request);
  if (call.op == OpKind::kAllReduce) return schedule_all_reduce(state, wanted);
  schedule_slots(call.op, wanted, state.schedule);
}

// A reduction by messages receives from all ranks at once: with many of them, in shorter segments, so that the scratch
// stays small, but not in such short ones that the messages are what costs.
constexpr size_t kReducedAtOnceBytes = size_t{1} << 20;
constexpr size_t kShortestSegmentBytes = 32 * 1024;

std::vector<size_t> sizes_of(const std::vector<Block>& blocks, size_t element) {
  std::vector<size_t> sizes;
  for (const Block& block : blocks) sizes.push_back(block.count * element);
  return sizes;
}

void schedule_messages_only(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const size_t element = dtype_size(call.dtype);
  const size_t ranks = state.members.size();
  size_t segment = state.messages->limits.segment_bytes;
  if (reduces(call.op)) segment = std::min(segment, std::max(kShortestSegmentBytes, kReducedAtOnceBytes / ranks));
  schedule_messages(call.op,
                    {.rank = state.rank,
                     .size = state.size(),
                     .element_bytes = element,
                     .segment_bytes = std::max<size_t>(1, segment / element) * element,
                     .root = call.root,
                     .bytes = call.bytes(),
                     .inputs = sizes_of(request.inputs, element),
                     .outputs = sizes_of(request.outputs, element)},
                    state.schedule);
}

// Whether what the ranks of each host make together may be reduced in a second step.
bool may_reduce_by_host(const Descriptor& call) {
  return !reduces(call.op) || (!call.ordered && has_partial_results(call.dtype, call.reduce_op));
}

void schedule_between_hosts(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  state.streams = false;
  const bool by_host = has_hierarchical_schedule(call.op) && may_reduce_by_host(call);
  const size_t element = dtype_size(call.dtype);
  const size_t widening = reduces(call.op) ? partial_size(call.dtype, call.reduce_op) / element : 1;
  if (state.topology.is_flat() || !by_host)
    schedule_messages_only(state, request);
  else
    schedule_hierarchical(call.op,
                          {.topology = state.topology,
                           .rank = state.rank,
                           .blocks = state.blocks,
                           .element_bytes = element,
                           .chunk_bytes = state.layout.chunk_bytes,
                           .segment_bytes = state.messages->limits.segment_bytes,
                           .root = call.root,
                           .bytes = call.bytes(),
                           .widening = widening,
                           .earlier_chunks = state.chunks},
                          state.schedule);
  state.message_scratch.reserve(state.schedule.scratch_bytes);
}

}  // namespace

bool make_schedule_early(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (call.op == OpKind::kAllToAll) return false;  // others' buffer tables say how much
  fill_blocks(state, request);
  if (may_be_read(state, call, state.blocks.largest())) return false;
  schedule_in_slots(state, request);
  return true;
}

void make_schedule(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  fill_blocks(state, request);
  if (state.topology.spans_hosts()) return schedule_between_hosts(state, request);
  if (!all_read(state, call, state.blocks.largest())) return schedule_in_slots(state, request);
  state.streams = copied_bytes(state, request) >= kStreamedBytes;
  schedule_reading(state, call);
}

}  // namespace procgroup
