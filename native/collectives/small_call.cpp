#include "collectives/small_call.hpp"

#include <cstring>

#include "collectives/block_counts.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"

namespace procgroup {
namespace {

void copy_unless_same(void* to, const void* from, size_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

std::byte* pack(std::byte* to, const std::vector<Block>& blocks, size_t element_bytes) {
  for (const Block& block : blocks) {
    copy_unless_same(to, block.data, block.count * element_bytes);
    to += block.count * element_bytes;
  }
  return to;
}

const std::byte* payload(const CollectiveState& state, const Descriptor& call, int rank) {
  return state.member(rank).payload(call.sequence, largest_contribution(call, state.size()));
}

BufferTable table_of(const CollectiveState& state, const Descriptor& call, int rank) {
  return {state.member(rank).small(call.sequence), state.size()};
}

void copy_out_blocks(CollectiveState& state, const Request& request) {
  const size_t element = dtype_size(request.descriptor.dtype);
  for (int rank = 0; rank < state.size(); ++rank) {
    const Block& output = request.outputs[static_cast<size_t>(rank)];
    copy_unless_same(output.data, payload(state, request.descriptor, rank), output.count * element);
  }
}

bool has_room(const CollectiveState& state, const Descriptor& call, uint64_t count) {
  const size_t room = state.layout.small_bytes - BufferTable::bytes(state.size());
  return count <= room / dtype_size(call.dtype);
}

void copy_out_pairs(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const size_t element = dtype_size(call.dtype);
  for (int rank = 0; rank < state.size(); ++rank) {
    const uint64_t before = state.counts.given_before(rank, state.rank);
    const Block& output = request.outputs[static_cast<size_t>(rank)];
    copy_unless_same(output.data, table_of(state, call, rank).data() + before * element, output.count * element);
  }
}

}  // namespace

void copy_in_small(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (!gives(call.op, state.rank, call.root)) return;
  std::byte* to = state.mine().payload(call.sequence, largest_contribution(call, state.size()));
  if (has_input_blocks(call.op))
    pack(to, request.inputs, dtype_size(call.dtype));
  else
    copy_unless_same(to, request.input, input_count(request, state.rank) * dtype_size(call.dtype));
}

// Reductions, which are the most frequent small calls, are made here, and by their kernel: two functions less.
void finish_small(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  if (is_by_pair(call.op)) return copy_out_pairs(state, request);
  if (!takes(call.op, state.rank, call.root)) return;
  if (has_output_blocks(call.op)) return copy_out_blocks(state, request);
  const size_t element = dtype_size(call.dtype);
  if (!reduces(call.op)) {
    const size_t block = has_input_blocks(call.op) ? static_cast<size_t>(state.rank) : 0;
    return copy_unless_same(request.output, payload(state, call, call.root) + call.bytes() * block, call.bytes());
  }
  size_t before = 0;
  for (int rank = 0; rank < state.rank && has_input_blocks(call.op); ++rank)
    before += request.inputs[static_cast<size_t>(rank)].count;
  const size_t count = has_input_blocks(call.op) ? request.inputs[static_cast<size_t>(state.rank)].count : call.count;
  const int sources = sources_of(call.op, state.rank, state.size());
  for (int rank = 0; rank < sources; ++rank)
    state.sources[static_cast<size_t>(rank)] = payload(state, call, rank) + before * element;
  if (sources == 1)  // the law of one source: see dtype/reduce_ops.hpp
    return copy_unless_same(request.output, state.sources[0], count * element);
  reduction_kernel(call.dtype, call.reduce_op)(request.output, state.sources.data(), sources, count);
}

void copy_in_all_to_all(CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  uint64_t count = 0;
  for (const Block& block : request.inputs) count += block.count;
  const bool small = has_room(state, call, count);
  show_arrays(state, request, !small);
  if (small) pack(table_of(state, call, state.rank).data(), request.inputs, dtype_size(call.dtype));
}

bool all_to_all_is_small(const CollectiveState& state, const Descriptor& call) {
  for (int rank = 0; rank < state.size(); ++rank)
    if (!has_room(state, call, state.counts.given(rank))) return false;
  return true;
}

}  // namespace procgroup
