// Schedules for blocks, for every number of ranks and unequal sizes, over tiny slots and in random orders.
#include "schedules/block_schedules.hpp"

#include <functional>

#include "tests/schedules/schedule_simulation.hpp"

namespace procgroup {
namespace {

using testing::Elements;
using testing::Simulation;

constexpr size_t kSlotBytes = 1024;
constexpr size_t kElement = sizeof(uint32_t);
constexpr int kSizes[] = {1, 2, 3, 4, 7};
constexpr size_t kCounts[] = {0, 1, 2, 31, 127, 256, 257, 1009, 3001};

uint32_t value(int from, int to, size_t index) {
  return static_cast<uint32_t>(from * 1'000'003 + to * 10'007 + static_cast<int>(index));
}

Elements block(int from, int to, size_t bytes) {
  Elements elements(bytes / kElement);
  for (size_t index = 0; index < elements.size(); ++index) elements[index] = value(from, to, index);
  return elements;
}

// What is true of a table for all ranks: how long the block between two ranks is.
BlockTable table_of(int size, const std::function<size_t(int from, int to)>& count) {
  BlockTable table;
  table.reset(size, 0);
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) table.between(from, to) = count(from, to) * kElement;
  return table;
}

void run(Simulation& world, const BlockTable& table, OpKind op, int root, unsigned seed) {
  for (int rank = 0; rank < world.size(); ++rank)
    schedule_blocks({.op = op,
                     .rank = rank,
                     .size = world.size(),
                     .root = root,
                     .element_bytes = kElement,
                     .blocks = table,
                     .chunk_bytes = kSlotBytes,
                     .earlier_chunks = seed % 7},
                    world[rank].schedule);
  world.run(seed);
}

void for_all(const std::function<void(int size, size_t count, unsigned seed)>& body) {
  for (const int size : kSizes)
    for (const size_t count : kCounts)
      for (unsigned seed = 0; seed < 5; ++seed) {
        CASE("%d ranks, %zu elements, seed %u", size, count, seed);
        body(size, count, seed);
      }
}

void gathers() {
  for_all([](int size, size_t count, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    const BlockTable table = table_of(size, [&](int, int) { return count; });
    Simulation world(size, kSlotBytes);
    for (int rank = 0; rank < size; ++rank) {
      world[rank].inputs = {block(rank, 0, count * kElement)};
      if (rank == root) world[rank].outputs.assign(static_cast<size_t>(size), Elements(count));
    }
    run(world, table, OpKind::kGather, root, seed);
    for (int from = 0; from < size; ++from) {
      CASE("root %d, from rank %d", root, from);
      CHECK_EQUAL(world[root].outputs[static_cast<size_t>(from)], block(from, 0, count * kElement));
    }
  });
}

void all_gathers_of_unequal_blocks() {
  for_all([](int size, size_t count, unsigned seed) {
    const BlockTable table =
        table_of(size, [&](int from, int) { return (from + seed) % 3 == 0 ? 0 : count / (from + 1); });
    Simulation world(size, kSlotBytes);
    for (int rank = 0; rank < size; ++rank) {
      world[rank].inputs = {block(rank, 0, table.between(rank, 0))};
      for (int from = 0; from < size; ++from) world[rank].outputs.emplace_back(table.between(from, rank) / kElement);
    }
    run(world, table, OpKind::kAllGather, -1, seed);
    for (int rank = 0; rank < size; ++rank)
      for (int from = 0; from < size; ++from) {
        CASE("from rank %d to rank %d", from, rank);
        CHECK_EQUAL(world[rank].outputs[static_cast<size_t>(from)], block(from, 0, table.between(from, rank)));
      }
  });
}

void scatters() {
  for_all([](int size, size_t count, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    const BlockTable table = table_of(size, [&](int, int) { return count; });
    Simulation world(size, kSlotBytes);
    for (int rank = 0; rank < size; ++rank) world[rank].outputs = {Elements(count)};
    for (int to = 0; to < size; ++to) world[root].inputs.push_back(block(root, to, count * kElement));
    run(world, table, OpKind::kScatter, root, seed);
    for (int to = 0; to < size; ++to) {
      CASE("root %d, to rank %d", root, to);
      CHECK_EQUAL(world[to].outputs[0], block(root, to, count * kElement));
    }
  });
}

void reduce_scatters_of_unequal_blocks() {
  for_all([](int size, size_t count, unsigned seed) {
    const BlockTable table = table_of(size, [&](int, int to) { return (to + seed) % 3 == 0 ? 0 : count / (to + 1); });
    Simulation world(size, kSlotBytes);
    for (int rank = 0; rank < size; ++rank) {
      for (int to = 0; to < size; ++to) world[rank].inputs.push_back(block(rank, to, table.between(rank, to)));
      world[rank].outputs = {Elements(table.between(0, rank) / kElement)};
    }
    run(world, table, OpKind::kReduceScatter, -1, seed);
    for (int to = 0; to < size; ++to) {
      Elements sums(world[to].outputs[0].size());
      for (size_t index = 0; index < sums.size(); ++index)
        for (int from = 0; from < size; ++from) sums[index] += value(from, to, index);
      CASE("rank %d", to);
      CHECK_EQUAL(world[to].outputs[0], sums);
    }
  });
}

void all_to_alls_of_unequal_blocks() {
  for_all([](int size, size_t count, unsigned seed) {
    const BlockTable table = table_of(size, [&](int from, int to) {
      return (from * 5 + to * 3 + seed) % 4 == 0 ? 0 : count / static_cast<size_t>(1 + (from + 2 * to) % 4);
    });
    Simulation world(size, kSlotBytes);
    for (int rank = 0; rank < size; ++rank) {
      for (int to = 0; to < size; ++to) world[rank].inputs.push_back(block(rank, to, table.between(rank, to)));
      for (int from = 0; from < size; ++from) world[rank].outputs.emplace_back(table.between(from, rank) / kElement);
    }
    run(world, table, OpKind::kAllToAll, -1, seed);
    for (int to = 0; to < size; ++to)
      for (int from = 0; from < size; ++from) {
        CASE("from rank %d to rank %d", from, to);
        CHECK_EQUAL(world[to].outputs[static_cast<size_t>(from)], block(from, to, table.between(from, to)));
      }
  });
}

// However much ranks 1 and 2 move between them, or keep: rank 0 moves little, and ends as all others do.
void a_schedule_of_all_to_all_is_as_long_as_its_ranks_own_blocks() {
  constexpr size_t kMany = size_t{1} << 60;
  BlockTable table = table_of(3, [](int, int) { return 2 * kSlotBytes / kElement; });
  const ScheduleRequest request{
      .op = OpKind::kAllToAll, .size = 3, .element_bytes = kElement, .blocks = table, .chunk_bytes = kSlotBytes};
  Schedule alone;
  schedule_blocks(request, alone);
  table.between(1, 1) = kMany;
  Schedule schedule;
  schedule_blocks(request, schedule);
  CHECK(schedule.steps.size() == alone.steps.size() && schedule.published == alone.published &&
        schedule.chunks == alone.chunks);
  table.between(1, 2) = kMany;
  schedule_blocks(request, schedule);
  CHECK(schedule.steps.size() == alone.steps.size() + 1);
  CHECK(schedule.published == kMany / (kSlotBytes / 2) && schedule.chunks == schedule.published);
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(100);
  RUN_TEST(gathers);
  RUN_TEST(all_gathers_of_unequal_blocks);
  RUN_TEST(scatters);
  RUN_TEST(reduce_scatters_of_unequal_blocks);
  RUN_TEST(all_to_alls_of_unequal_blocks);
  RUN_TEST(a_schedule_of_all_to_all_is_as_long_as_its_ranks_own_blocks);
}
