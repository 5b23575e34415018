#include "ops/preparation.hpp"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "dtype/preparation.hpp"

namespace procgroup {

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

}  // namespace procgroup
