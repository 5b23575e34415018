#include "schedules/schedule.hpp"

#include <algorithm>

namespace procgroup {

size_t BlockTable::largest() const { return bytes_.empty() ? 0 : *std::ranges::max_element(bytes_); }

size_t BlockTable::largest_moved() const {
  size_t largest = 0;
  for (int rank = 0; rank < static_cast<int>(size_); ++rank) largest = std::max(largest, largest_moved(rank));
  return largest;
}

size_t BlockTable::largest_moved(int rank) const {
  size_t largest = 0;
  for (int peer = 0; peer < static_cast<int>(size_); ++peer)
    if (peer != rank) largest = std::max({largest, between(rank, peer), between(peer, rank)});
  return largest;
}

}  // namespace procgroup
