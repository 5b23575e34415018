// Schedules that read arrays in place, for every number of ranks, in random orders.
#include "schedules/single_copy_schedules.hpp"

#include <functional>

#include "tests/schedules/schedule_simulation.hpp"

namespace procgroup {
namespace {

using testing::Elements;
using testing::Simulation;

constexpr size_t kElement = sizeof(uint32_t);
constexpr uint32_t kReused = 0xdeadbeef;

Elements block(int from, int to, size_t count) {
  Elements elements(count);
  for (size_t index = 0; index < count; ++index)
    elements[index] = static_cast<uint32_t>(from * 1'000'003 + to * 10'007 + static_cast<int>(index));
  return elements;
}

Elements sum(int size, int to, size_t count) {
  Elements total(count);
  for (int from = 0; from < size; ++from) {
    const Elements one = block(from, to, count);
    for (size_t index = 0; index < count; ++index) total[index] += one[index];
  }
  return total;
}

size_t unequal(int from, int to, size_t count) {
  return (from + to) % 3 == 0 ? 0 : count / static_cast<size_t>(1 + (from + 2 * to) % 4);
}

// A rank's user reuses its arrays as soon as its own schedule has completed.
void run(Simulation& world, const BlockTable& table, OpKind op, int root, unsigned seed) {
  for (int rank = 0; rank < world.size(); ++rank) {
    schedule_reading({.op = op,
                      .rank = rank,
                      .size = world.size(),
                      .root = root,
                      .element_bytes = kElement,
                      .blocks = table,
                      .chunk_bytes = 512},
                     world[rank].schedule);
    world[rank].when_done = [](testing::SimulatedRank& mine) {
      for (Elements& input : mine.inputs) input.assign(input.size(), kReused);
    };
  }
  world.run(seed);
}

void for_all(const std::function<void(int size, size_t count, unsigned seed)>& body) {
  for (const int size : {1, 2, 3, 4, 7})
    for (const size_t count : {0, 1, 2, 31, 127, 128, 129, 1009})
      for (unsigned seed = 0; seed < 5; ++seed) {
        CASE("%d ranks, %zu elements, seed %u", size, count, seed);
        body(size, count, seed);
      }
}

BlockTable equal_table(int size, size_t count) {
  BlockTable table;
  table.reset(size, count * kElement);
  return table;
}

Simulation whole_arrays(int size, size_t count) {
  Simulation world(size, kElement);
  for (int rank = 0; rank < size; ++rank) {
    world[rank].inputs = {block(rank, 0, count)};
    world[rank].outputs = {Elements(count)};
  }
  return world;
}

void whole() {
  for_all([](int size, size_t count, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    Simulation broadcast = whole_arrays(size, count);
    run(broadcast, equal_table(size, count), OpKind::kBroadcast, root, seed);
    for (int rank = 0; rank < size; ++rank) {
      CASE("broadcast, root %d, rank %d", root, rank);
      if (rank != root) CHECK_EQUAL(broadcast[rank].outputs[0], block(root, 0, count));
    }
    Simulation reduce = whole_arrays(size, count);
    run(reduce, equal_table(size, count), OpKind::kReduce, root, seed);
    CASE("reduce, root %d", root);
    CHECK_EQUAL(reduce[root].outputs[0], sum(size, 0, count));
  });
}

void all_reduces() {
  for_all([](int size, size_t count, unsigned seed) {
    Simulation world = whole_arrays(size, count);
    world.in_place = seed % 2 == 0;
    if (world.in_place)
      for (int rank = 0; rank < size; ++rank) world[rank].outputs = world[rank].inputs;
    run(world, equal_table(size, count), OpKind::kAllReduce, -1, seed);
    for (int rank = 0; rank < size; ++rank) {
      CASE("in place %d, rank %d", world.in_place, rank);
      CHECK_EQUAL(world[rank].outputs[0], sum(size, 0, count));
    }
  });
}

void gathers_and_scatters() {
  for_all([](int size, size_t count, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    Simulation gather = whole_arrays(size, count);
    gather[root].outputs.assign(static_cast<size_t>(size), Elements(count));
    run(gather, equal_table(size, count), OpKind::kGather, root, seed);
    for (int from = 0; from < size; ++from) {
      CASE("gather, root %d, from rank %d", root, from);
      CHECK_EQUAL(gather[root].outputs[static_cast<size_t>(from)], block(from, 0, count));
    }
    Simulation scatter = whole_arrays(size, count);
    scatter.input_blocks = true;
    scatter[root].inputs.clear();
    for (int to = 0; to < size; ++to) scatter[root].inputs.push_back(block(root, to, count));
    run(scatter, equal_table(size, count), OpKind::kScatter, root, seed);
    for (int to = 0; to < size; ++to) {
      CASE("scatter, root %d, to rank %d", root, to);
      CHECK_EQUAL(scatter[to].outputs[0], block(root, to, count));
    }
  });
}

void unequal_blocks() {
  for_all([](int size, size_t count, unsigned seed) {
    BlockTable table = equal_table(size, 0);
    Simulation world(size, kElement);
    world.input_blocks = true;
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        table.between(from, to) = unequal(from, to, count) * kElement;
        world[from].inputs.push_back(block(from, to, unequal(from, to, count)));
        world[to].outputs.emplace_back(unequal(from, to, count));
      }
    }
    run(world, table, OpKind::kAllToAll, -1, seed);
    for (int from = 0; from < size; ++from)
      for (int to = 0; to < size; ++to) {
        CASE("from rank %d to rank %d", from, to);
        CHECK_EQUAL(world[to].outputs[static_cast<size_t>(from)], block(from, to, unequal(from, to, count)));
      }
  });
}

void reduce_scatters() {
  for_all([](int size, size_t count, unsigned seed) {
    Simulation world(size, kElement);
    world.input_blocks = true;
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) world[from].inputs.push_back(block(from, to, count));
      world[from].outputs.emplace_back(count);
    }
    run(world, equal_table(size, count), OpKind::kReduceScatter, -1, seed);
    for (int to = 0; to < size; ++to) {
      CASE("rank %d", to);
      CHECK_EQUAL(world[to].outputs[0], sum(size, to, count));
    }
  });
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(100);
  RUN_TEST(whole);
  RUN_TEST(all_reduces);
  RUN_TEST(gathers_and_scatters);
  RUN_TEST(unequal_blocks);
  RUN_TEST(reduce_scatters);
}
