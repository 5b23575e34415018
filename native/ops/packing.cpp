#include "ops/packing.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "dtype/preparation.hpp"

namespace procgroup {
namespace {

size_t bytes_of(const ReducedArray& array) { return array.block.count * dtype_size(array.dtype); }

// Call `copy(array, at)` for each of the arrays that has elements, with its place in the pack.
template <class Copy>
void for_each_place(const std::vector<ReducedArray>& arrays, std::byte* pack, const Copy& copy) {
  for (const ReducedArray& array : arrays) {
    if (array.block.count != 0) copy(array, pack);
    pack += bytes_of(array);
  }
}

void copy_in(const ReducedArray& array, std::byte* at) {
  if (needs_preparation(array.op, array.dtype, array.factor))
    prepare(array.op, array.dtype, array.factor, at, array.block.data, array.block.count);
  else
    std::memcpy(at, array.block.data, bytes_of(array));
}

void copy_out(const ReducedArray& array, const std::byte* at) { std::memcpy(array.block.data, at, bytes_of(array)); }

void describe(Descriptor& call, const std::vector<ReducedArray>& arrays) {
  std::vector<Block> blocks;
  blocks.reserve(arrays.size());
  call.count = 0;
  for (const ReducedArray& array : arrays) {
    blocks.push_back(array.block);
    call.count += array.block.count;
  }
  call.splits = hash_of_sizes(blocks);
}

}  // namespace

std::vector<std::vector<size_t>> assign_packs(const std::vector<ReducedArray>& arrays, bool share_memory) {
  struct Open {
    size_t pack;
    size_t bytes;
  };
  std::array<std::array<std::optional<Open>, kReduceOps>, kDtypes> packs_with_room;
  std::vector<std::vector<size_t>> packs;
  for (size_t index = 0; index < arrays.size(); ++index) {
    const ReducedArray& array = arrays[index];
    std::optional<Open>& open = packs_with_room[static_cast<size_t>(array.dtype)][static_cast<size_t>(array.op)];
    const bool small = bytes_of(array) <= kPackedArrayBytes && !share_memory;
    if (small && open && open->bytes + bytes_of(array) <= kPackBytes) {
      packs[open->pack].push_back(index);
      open->bytes += bytes_of(array);
      continue;
    }
    if (small) open = Open{packs.size(), bytes_of(array)};
    packs.push_back({index});
  }
  return packs;
}

std::vector<std::vector<size_t>> assign_neighbours(const std::vector<ReducedArray>& arrays) {
  std::vector<std::vector<size_t>> packs;
  for (size_t index = 0; index < arrays.size(); ++index) {
    const ReducedArray* last = packs.empty() ? nullptr : &arrays[packs.back().front()];
    const bool goes_along = last != nullptr && last->dtype == arrays[index].dtype && last->op == arrays[index].op &&
                            row_of(last->op).preparation != Preparation::kFactor;
    if (!goes_along) packs.emplace_back();
    packs.back().push_back(index);
  }
  return packs;
}

Request all_reduce_in_place(const std::vector<ReducedArray>& arrays) {
  Request request;
  Descriptor& call = request.descriptor;
  call.op = OpKind::kAllReduce;
  call.dtype = arrays[0].dtype;
  call.reduce_op = arrays[0].op;
  call.count = arrays[0].block.count;
  request.factor = arrays[0].factor;
  if (arrays.size() == 1) {
    request.input = request.output = arrays[0].block.data;
    return request;
  }
  describe(call, arrays);
  for (const ReducedArray& array : arrays) request.inputs.push_back(array.block);
  request.outputs = request.inputs;
  return request;
}

Request all_reduce_of(std::vector<ReducedArray> arrays) {
  Request request;
  Descriptor& call = request.descriptor;
  call.op = OpKind::kAllReduce;
  call.dtype = arrays[0].dtype;
  call.reduce_op = arrays[0].op;
  call.count = arrays[0].block.count;
  request.input = request.output = arrays[0].block.data;
  if (arrays.size() == 1 && !needs_preparation(call.reduce_op, call.dtype, arrays[0].factor)) return request;
  if (arrays.size() > 1) describe(call, arrays);
  const std::shared_ptr<std::byte[]> pack(new std::byte[call.bytes()]);
  request.input = request.output = pack.get();
  request.before = [arrays, pack] { for_each_place(arrays, pack.get(), copy_in); };
  request.after = [arrays = std::move(arrays), pack] { for_each_place(arrays, pack.get(), copy_out); };
  return request;
}

}  // namespace procgroup
