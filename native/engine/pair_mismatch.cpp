#include "engine/pair_mismatch.hpp"

#include <string>

namespace procgroup {

Failure pair_mismatch(const Descriptor& call, int size, int from, int to, uint64_t given, uint64_t expected) {
  const std::string dtype = dtype_name(call.dtype);
  const std::string giver = "rank " + std::to_string(from);
  const std::string taker = "rank " + std::to_string(to);
  const std::string gives = std::to_string(given) + " " + dtype;
  const std::string expects = std::to_string(expected) + " " + dtype;
  Failure failure{.kind = Failure::Kind::kMismatch};
  failure.reason = giver + " gives " + gives + " to " + taker + ", which expects " + expects + " from it";
  failure.calls.assign(static_cast<size_t>(size), call.describe());
  failure.calls[static_cast<size_t>(from)] += ", " + gives + " to " + taker;
  failure.calls[static_cast<size_t>(to)] += ", " + expects + " from " + giver;
  return failure;
}

}  // namespace procgroup
