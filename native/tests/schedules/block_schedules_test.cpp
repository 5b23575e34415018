// Schedules for blocks, for every number of ranks and unequal sizes, over tiny slots and in random orders.
#include "tests/schedules/schedule_case.hpp"

namespace procgroup {
namespace {

constexpr size_t kSlotBytes = 1024;

void every_rank_gets_its_blocks(OpKind op) {
  const bool is_rooted = op == OpKind::kGather || op == OpKind::kScatter;
  for (const int size : {1, 2, 3, 4, 7})
    for (const size_t count : {0, 1, 2, 31, 127, 256, 257, 1009, 3001})
      for (unsigned seed = 0; seed < 5; ++seed)
        play({.op = op,
              .hosts = std::vector<int>(static_cast<size_t>(size)),
              .count = count,
              .by = By::kBlocks,
              .root = is_rooted ? static_cast<int>(seed) % size : -1,
              .seed = seed,
              .slot_bytes = kSlotBytes});
}

// However much ranks 1 and 2 move between them, or keep: rank 0 moves little, and ends as all others do.
void a_schedule_of_all_to_all_is_as_long_as_its_ranks_own_blocks() {
  constexpr size_t kMany = size_t{1} << 60;
  BlockTable table;
  table.reset(3, 2 * kSlotBytes);
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
  for (const OpKind op :
       {OpKind::kGather, OpKind::kAllGather, OpKind::kScatter, OpKind::kReduceScatter, OpKind::kAllToAll})
    RUN_TEST(every_rank_gets_its_blocks, op);
  RUN_TEST(a_schedule_of_all_to_all_is_as_long_as_its_ranks_own_blocks);
}
