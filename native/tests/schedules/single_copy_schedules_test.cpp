// Schedules that read arrays in place, for every number of ranks, in random orders.
#include "tests/schedules/schedule_case.hpp"

namespace procgroup {
namespace {

void every_rank_gets_the_result(OpKind op) {
  const bool is_rooted = row_of(op).givers == Ranks::kRoot || row_of(op).takers == Ranks::kRoot;
  for (const int size : {1, 2, 3, 4, 7})
    for (const size_t count : {0, 1, 2, 31, 127, 128, 129, 1009})
      for (unsigned seed = 0; seed < 5; ++seed)
        play({.op = op,
              .hosts = std::vector<int>(static_cast<size_t>(size)),
              .count = count,
              .by = By::kReading,
              .root = is_rooted ? static_cast<int>(seed) % size : -1,
              .seed = seed,
              .slot_bytes = 512,
              .in_place = op == OpKind::kAllReduce && seed % 2 == 0});
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(100);
  for (const OpKind op : {OpKind::kBroadcast, OpKind::kReduce, OpKind::kAllReduce, OpKind::kGather, OpKind::kScatter,
                          OpKind::kAllGather, OpKind::kAllToAll, OpKind::kReduceScatter})
    RUN_TEST(every_rank_gets_the_result, op);
}
