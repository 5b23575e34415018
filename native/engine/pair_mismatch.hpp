// How an all_to_all says that two ranks do not agree on the piece between them.
#pragma once

#include "engine/failure.hpp"
#include "transport/descriptor.hpp"

namespace procgroup {

// `from` gives `given` elements to `to`, which expects `expected`. Every rank of the group makes the same text.
Failure pair_mismatch(const Descriptor& call, int size, int from, int to, uint64_t given, uint64_t expected);

}  // namespace procgroup
