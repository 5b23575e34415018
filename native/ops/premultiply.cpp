#include "ops/premultiply.hpp"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "dtype/scale.hpp"

namespace procgroup {

void premultiply(Request& request) {
  std::vector<Block> from = request.inputs;
  if (from.empty()) from.push_back({const_cast<void*>(request.input), request.descriptor.count});
  const Dtype dtype = request.descriptor.dtype;
  size_t count = 0;
  for (const Block& block : from) count += block.count;
  const std::shared_ptr<std::byte[]> scaled(new std::byte[count * dtype_size(dtype)]);
  std::byte* at = scaled.get();
  for (Block& block : request.inputs) {
    block.data = at;
    at += block.count * dtype_size(dtype);
  }
  if (request.inputs.empty()) request.input = scaled.get();
  request.before = [before = std::move(request.before), from = std::move(from), scaled, dtype,
                    factor = request.factor] {
    if (before) before();
    std::byte* to = scaled.get();
    for (const Block& block : from) {
      scale(dtype, to, block.data, factor, block.count);
      to += block.count * dtype_size(dtype);
    }
  };
}

}  // namespace procgroup
