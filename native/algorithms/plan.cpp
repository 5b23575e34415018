#include "algorithms/plan.hpp"

#include <algorithm>

namespace procgroup {

size_t PieceTable::largest() const { return bytes_.empty() ? 0 : *std::ranges::max_element(bytes_); }

}  // namespace procgroup
