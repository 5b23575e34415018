#include "ops/preparation.hpp"

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "dtype/preparation.hpp"

namespace procgroup {
namespace {

// An array, and its place in the block that joins it with others.
struct Part {
  Block array;
  size_t offset;  // in bytes
};

struct Joined {
  std::vector<Block> blocks;
  std::vector<Part> parts;
  std::shared_ptr<std::byte[]> memory;  // null if no block joins several arrays
};

// One block per rank of several rows of blocks.
Joined join(const std::vector<Block>& rows, size_t own, size_t size, size_t element_bytes, bool on_device) {
  Joined joined{.blocks = {rows.begin(), rows.begin() + static_cast<ptrdiff_t>(size)}, .parts = {}, .memory = {}};
  std::vector<size_t> ranks;  // whose block is made of parts
  size_t bytes = 0;
  for (size_t rank = 0; rank < size; ++rank) {
    Block& block = joined.blocks[rank];
    const size_t first = block.count;
    std::vector<Block> arrays;
    for (size_t place = rank; place < rows.size(); place += size)
      if (rows[place].count != 0) arrays.push_back(rows[place]);
    if (arrays.empty()) continue;
    block = arrays[0];
    for (size_t index = 1; index < arrays.size(); ++index) block.count += arrays[index].count;
    // A rank compares its own arrays itself, and all others have one array or two.
    if (rank != own && block.count != first) block.joined = joined_counts(first, block.count - first);
    if (arrays.size() == 1) continue;
    ranks.push_back(rank);
    for (const Block& array : arrays) {
      joined.parts.push_back({array, bytes});
      bytes += array.count * element_bytes;
    }
  }
  if (ranks.empty() || on_device) return joined;
  joined.memory.reset(new std::byte[bytes]);
  std::byte* at = joined.memory.get();
  for (const size_t rank : ranks) {
    joined.blocks[rank].data = at;
    at += joined.blocks[rank].count * element_bytes;
  }
  return joined;
}

}  // namespace

void prepare(Request& request) {
  const ReduceOp op = request.descriptor.reduce_op;
  const Dtype dtype = request.descriptor.dtype;
  if (!needs_preparation(op, dtype, request.factor)) return;
  std::vector<Block> from = request.inputs;
  if (from.empty()) from.push_back({const_cast<void*>(request.input), request.descriptor.count});
  size_t count = 0;
  for (const Block& block : from) count += block.count;
  const std::shared_ptr<std::byte[]> prepared(new std::byte[count * dtype_size(dtype)]);
  std::byte* at = prepared.get();
  for (Block& block : request.inputs) {
    block.data = at;
    at += block.count * dtype_size(dtype);
  }
  if (request.inputs.empty()) request.input = prepared.get();
  request.before = [before = std::move(request.before), from = std::move(from), prepared, op, dtype,
                    factor = request.factor] {
    if (before) before();
    std::byte* to = prepared.get();
    for (const Block& block : from) {
      prepare(op, dtype, factor, to, block.data, block.count);
      to += block.count * dtype_size(dtype);
    }
  };
}

void join_blocks(Request& request, int rank, int size, bool on_device) {
  const auto own = static_cast<size_t>(rank);
  const auto ranks = static_cast<size_t>(size);
  if (request.inputs.size() <= ranks && request.outputs.size() <= ranks) return;
  const size_t element = dtype_size(request.descriptor.dtype);
  Joined read = join(request.inputs, own, ranks, element, on_device);
  Joined written = join(request.outputs, own, ranks, element, on_device);
  request.inputs = std::move(read.blocks);
  request.outputs = std::move(written.blocks);
  if (read.memory == nullptr && written.memory == nullptr) return;
  // It owns what is written, too: a backend keeps `before` for as long as it may write.
  request.before = [before = std::move(request.before), read = std::move(read), element, kept = written.memory] {
    if (before) before();
    for (const Part& part : read.parts)
      std::memcpy(read.memory.get() + part.offset, part.array.data, part.array.count * element);
  };
  request.after = [after = std::move(request.after), written = std::move(written), element] {
    if (after) after();
    for (const Part& part : written.parts)
      std::memcpy(part.array.data, written.memory.get() + part.offset, part.array.count * element);
  };
}

}  // namespace procgroup
