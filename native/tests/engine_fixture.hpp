// Whole engines, with ranks as threads of this process over one mapping, so that a race detector sees all of it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "group/engine.hpp"
#include "group/group.hpp"
#include "tests/check.hpp"

namespace procgroup {

inline void check(bool condition, const char* what, int rank) {
  if (condition) return;
  std::fprintf(stderr, "\nrank %d: %s\n", rank, what);
  std::abort();
}

struct Rank {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Group> group;
};

// A small layout, so that few elements already take many chunks.
inline constexpr GroupLayout kTiny{.small_bytes = 256, .slot_bytes = 1024, .chunk_bytes = 1024};

// Ranks of different `hosts` exchange messages, through rings; by default all are on one.
inline std::vector<Rank> make_world(int size, ReadingRanges reading = ReadingRanges::for_this_processor(),
                                    GroupLayout layout = kTiny, std::vector<int> hosts = {}) {
  std::vector<Rank> world(static_cast<size_t>(size));
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  hosts.resize(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    EngineOptions options{.rank = rank, .world_size = size, .ranks_are_threads = true};
    world[static_cast<size_t>(rank)].engine = std::make_unique<Engine>(options, true);
    check(world[static_cast<size_t>(rank)].engine->shares_memory(), "expected an arena", rank);
  }
  std::vector<uint64_t> offsets;
  for (int rank = 0; rank < size; ++rank) {
    Rank& mine = world[static_cast<size_t>(rank)];
    mine.engine->set_cores(1, size);
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank) mine.engine->attach_thread(peer, *world[static_cast<size_t>(peer)].engine);
    mine.group =
        std::make_unique<Group>(*mine.engine,
                                // Two ranks exchange from 8,000 bytes on, so that direct and exchanged are both tested.
                                GroupOptions{.id = 7,
                                             .name = "test",
                                             .members = members,
                                             .rank = rank,
                                             .hosts = hosts,
                                             .layout = layout,
                                             .exchanged_bytes = 8000,
                                             .reading = reading});
    offsets.push_back(mine.group->members().offset());
  }
  for (Rank& rank : world) rank.group->attach(offsets, hosts);
  return world;
}

inline void in_all_ranks(std::vector<Rank>& world, const std::function<void(Group&)>& body) {
  std::vector<std::thread> threads;
  for (Rank& rank : world)
    threads.emplace_back([&] {
      CASE("rank %d of %d", rank.group->rank(), rank.group->size());
      body(*rank.group);
    });
  for (std::thread& thread : threads) thread.join();
}

inline std::string text_of(const std::vector<int>& hosts) {
  std::string text = "hosts";
  for (const int host : hosts) text.append(" ").append(std::to_string(host));
  return text;
}

inline Request request_for(OpKind op, std::vector<int64_t>& data, int root = -1, ReduceOp reduce_op = ReduceOp::kSum) {
  Request request;
  request.descriptor.op = op;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.reduce_op = reduce_op;
  request.descriptor.root = root;
  request.descriptor.count = data.size();
  request.input = request.output = data.data();
  return request;
}

inline int64_t value(int rank, size_t index) { return static_cast<int64_t>(index % 1009) * (rank + 1); }

inline std::vector<int64_t> values(int rank, size_t count) {
  std::vector<int64_t> data(count);
  for (size_t index = 0; index < count; ++index) data[index] = value(rank, index);
  return data;
}

inline int64_t sum(int size, size_t index) { return static_cast<int64_t>(index % 1009) * size * (size + 1) / 2; }

}  // namespace procgroup
