#include "collectives/state.hpp"

#include "transport/arena.hpp"

namespace procgroup {

void CollectiveState::wake_peers() const {
  for (int peer = 0; peer < size(); ++peer) {
    const Arena* arena = (*arenas)[static_cast<size_t>(peer)];
    if (peer == rank || arena == nullptr) continue;
    // Pairs with the sleeper's increment, which comes before its last look at our flags: either it sees the
    // flag that was written before this load, or this load sees it asleep.
    if (arena->header().sleepers.load(std::memory_order_seq_cst) != 0) arena->wake();
  }
}

}  // namespace procgroup
