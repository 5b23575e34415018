// Calls that a test advances by hand, in any order of ranks, over the memory of the ranks' groups.
#pragma once

#include <memory>
#include <vector>

#include "collectives/collective_call.hpp"
#include "tests/engine_fixture.hpp"

namespace procgroup {

inline std::vector<const Arena*> arenas_of(const std::vector<Rank>& world) {
  std::vector<const Arena*> arenas;
  for (const Rank& rank : world) arenas.push_back(&rank.engine->arena());
  return arenas;
}

// In a group whose memory is at `offsets`.
inline CollectiveState state_at(const std::vector<uint64_t>& offsets, std::vector<Rank>& world, int rank,
                                const std::vector<const Arena*>& arenas) {
  std::vector<GroupMemoryView> views;
  std::vector<GroupMemoryView> readers;
  std::vector<const PeerMemory*> peers;
  const Engine& mine = *world[static_cast<size_t>(rank)].engine;
  for (size_t member = 0; member < world.size(); ++member) {
    views.emplace_back(*arenas[member], offsets[member], world.size(), kTiny);
    const int peer = static_cast<int>(member);
    peers.push_back(peer == rank ? nullptr : mine.peer_memory(peer));
    if (peer != rank) readers.push_back(views.back());
  }
  GroupHeap& heap = world[static_cast<size_t>(rank)].engine->heap();
  auto staging = std::make_unique<Staging>(heap.small_pool(kTiny, 1), heap.slots_pool(kTiny),
                                           views[static_cast<size_t>(rank)], readers);
  return {.rank = rank,
          .layout = kTiny,
          .members = views,
          .arenas = &arenas,
          .staging = std::move(staging),
          .sources = std::vector<const void*>(views.size()),
          .direct_bytes = 0,
          .exchanged_bytes = 8000,
          .peers = std::move(peers),
          .reading = {},
          .topology = Topology::one_host(static_cast<int>(world.size()), rank)};
}

inline CollectiveState state_of(std::vector<Rank>& world, int rank, const std::vector<const Arena*>& arenas) {
  std::vector<uint64_t> offsets;
  for (const Rank& member : world) offsets.push_back(member.group->members().offset());
  return state_at(offsets, world, rank, arenas);
}

}  // namespace procgroup
