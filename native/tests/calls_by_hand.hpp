// Calls that a test advances by hand, in any order of ranks, over the memory of the ranks' groups.
#pragma once

#include <memory>
#include <vector>

#include "engine/shared_call.hpp"
#include "engine_fixture.hpp"

namespace procgroup {

inline std::vector<const Arena*> arenas_of(const std::vector<Rank>& world) {
  std::vector<const Arena*> arenas;
  for (const Rank& rank : world) arenas.push_back(&rank.engine->arena());
  return arenas;
}

inline SharedState state_of(std::vector<Rank>& world, int rank, const std::vector<const Arena*>& arenas) {
  std::vector<GroupMemoryView> views;
  for (size_t member = 0; member < world.size(); ++member)
    views.emplace_back(*arenas[member], world[member].group->offset(), world.size(), kTiny);
  GroupHeap& heap = world[static_cast<size_t>(rank)].engine->heap();
  auto staging = std::make_unique<Staging>(heap.small_pool(kTiny), heap.slots_pool(kTiny), views, rank);
  return {.rank = rank,
          .layout = kTiny,
          .members = views,
          .arenas = &arenas,
          .staging = std::move(staging),
          .progress = 0,
          .chunks = 0,
          .plan = {},
          .pieces = {},
          .sources = std::vector<const void*>(views.size()),
          .direct_bytes = 0,
          .exchanged_bytes = 8000,
          .peers = {},
          .reading = {}};
}

}  // namespace procgroup
