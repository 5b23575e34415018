// The members of a group, for collectives that send messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/failure.hpp"

namespace procgroup {

struct GroupView {
  uint64_t id;
  int rank;                         // ours, in the group
  std::vector<int> members;         // world ranks, by group rank
  std::vector<int> global_ranks{};  // for texts, see rank_name

  int size() const { return static_cast<int>(members.size()); }
  int world_rank(int rank_in_group) const { return members[static_cast<size_t>(rank_in_group)]; }
  // The group rank of a world rank; -1 when it is not a member.
  int group_rank(int world) const {
    const auto found = std::find(members.begin(), members.end(), world);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }
  // A failure of Messages or of the handshake, which is about world ranks.
  Failure by_group_rank(Failure failure) const {
    failure.renumber([this](int world_rank) { return group_rank(world_rank); });
    return failure;
  }
};

}  // namespace procgroup
