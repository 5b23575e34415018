// Every schedule of whole arrays through slots, on simulated ranks in random orders, also in place.
#include "schedules/slot_schedules.hpp"

#include <functional>

#include "tests/check.hpp"
#include "tests/schedules/schedule_simulation.hpp"

namespace procgroup {
namespace {

using testing::Elements;
using testing::Simulation;

constexpr size_t kElement = sizeof(uint32_t);
constexpr size_t kSlotBytes = 64 * kElement;
constexpr int kSizes[] = {1, 2, 3, 4, 7, 16};
constexpr size_t kCounts[] = {1, 3, 63, 64, 65, 300, 1000};

using MakeSchedule = void (*)(const ScheduleRequest&, Schedule&);

uint32_t value(int rank, size_t index) {
  return static_cast<uint32_t>(rank + 1) * 1000u + static_cast<uint32_t>(index);
}

Elements array_of(int rank, size_t count) {
  Elements elements(count);
  for (size_t index = 0; index < count; ++index) elements[index] = value(rank, index);
  return elements;
}

// Noticing the order, the first source and every other one.
uint32_t in_order(uint32_t left, uint32_t right) { return left * 31 + right; }

Elements reduced(int sources, size_t count) {
  Elements result = array_of(0, count);
  for (int rank = 1; rank < sources; ++rank)
    for (size_t index = 0; index < count; ++index) result[index] = in_order(result[index], value(rank, index));
  return result;
}

Simulation play(OpKind op, int size, size_t count, bool in_place, int root, unsigned seed,
                MakeSchedule make = schedule_slots) {
  Simulation world(size, kSlotBytes);
  world.combine = in_order;
  world.in_place = in_place;
  for (int rank = 0; rank < size; ++rank) {
    world[rank].inputs = {array_of(rank, count)};
    world[rank].outputs = {in_place ? array_of(rank, count) : Elements(count)};
    make({.op = op,
          .rank = rank,
          .size = size,
          .root = root,
          .element_bytes = kElement,
          .bytes = count * kElement,
          .chunk_bytes = kSlotBytes,
          .earlier_chunks = seed % 5},
         world[rank].schedule);
  }
  world.run(seed);
  return world;
}

void for_all(const std::function<void(int size, size_t count, bool in_place, unsigned seed)>& check) {
  unsigned seed = 0;
  for (const int size : kSizes)
    for (const size_t count : kCounts)
      for (const bool in_place : {false, true}) {
        CASE("%d ranks, %zu elements, in place %d, seed %u", size, count, in_place, ++seed);
        check(size, count, in_place, seed);
      }
}

void every_rank_gets_the_reduction_in_rank_order() {
  for_all([](int size, size_t count, bool in_place, unsigned seed) {
    std::vector<MakeSchedule> schedules = {schedule_slots, schedule_all_reduce_scattered};
    if (size == 2) schedules.push_back(schedule_all_reduce_exchanged);
    for (size_t index = 0; index < schedules.size(); ++index) {
      CASE("schedule %zu", index);
      Simulation world = play(OpKind::kAllReduce, size, count, in_place, -1, seed, schedules[index]);
      for (int rank = 0; rank < size; ++rank) {
        CASE("rank %d", rank);
        CHECK_EQUAL(world[rank].outputs[0], reduced(size, count));
      }
    }
  });
}

void a_root_gives_its_array_to_all() {
  for_all([](int size, size_t count, bool, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    Simulation world = play(OpKind::kBroadcast, size, count, false, root, seed);
    for (int rank = 0; rank < size; ++rank) {
      CASE("root %d, rank %d", root, rank);
      if (rank != root) CHECK_EQUAL(world[rank].outputs[0], array_of(root, count));
    }
  });
}

void a_root_gets_the_reduction() {
  for_all([](int size, size_t count, bool in_place, unsigned seed) {
    const int root = static_cast<int>(seed) % size;
    Simulation world = play(OpKind::kReduce, size, count, in_place, root, seed);
    CASE("root %d", root);
    CHECK_EQUAL(world[root].outputs[0], reduced(size, count));
  });
}

void each_rank_gets_the_reduction_of_the_lower_ones() {
  for_all([](int size, size_t count, bool in_place, unsigned seed) {
    for (const OpKind op : {OpKind::kScan, OpKind::kExscan}) {
      Simulation world = play(op, size, count, in_place, -1, seed);
      for (int rank = 0; rank < size; ++rank) {
        CASE("%s, rank %d", op_name(op), rank);
        const int sources = sources_of(op, rank, size);
        const Elements untouched = in_place ? array_of(rank, count) : Elements(count);
        CHECK_EQUAL(world[rank].outputs[0], (sources == 0 ? untouched : reduced(sources, count)));
      }
    }
  });
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_rank_gets_the_reduction_in_rank_order);
  RUN_TEST(a_root_gives_its_array_to_all);
  RUN_TEST(a_root_gets_the_reduction);
  RUN_TEST(each_rank_gets_the_reduction_of_the_lower_ones);
}
