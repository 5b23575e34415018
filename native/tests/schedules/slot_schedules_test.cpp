// Every schedule of whole arrays through slots, on simulated ranks in random orders, also in place.
#include "tests/schedules/schedule_case.hpp"

namespace procgroup {
namespace {

void every_rank_gets_the_result_in_rank_order(OpKind op, By by) {
  const bool is_rooted = op == OpKind::kBroadcast || op == OpKind::kReduce;
  unsigned seed = 0;
  for (const int size : {1, 2, 3, 4, 7, 16}) {
    if (by == By::kExchanged && size != 2) continue;
    for (const size_t count : {1, 3, 63, 64, 65, 300, 1000})
      for (const bool in_place : {false, true})
        if (op != OpKind::kBroadcast || !in_place)
          play({.op = op,
                .hosts = std::vector<int>(static_cast<size_t>(size)),
                .count = count,
                .by = by,
                .root = is_rooted ? static_cast<int>(seed) % size : -1,
                .seed = ++seed,
                .in_place = in_place});
  }
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(110);
  for (const By by : {By::kWhole, By::kScattered, By::kExchanged})
    RUN_TEST(every_rank_gets_the_result_in_rank_order, OpKind::kAllReduce, by);
  for (const OpKind op : {OpKind::kBroadcast, OpKind::kReduce, OpKind::kScan, OpKind::kExscan})
    RUN_TEST(every_rank_gets_the_result_in_rank_order, op, By::kWhole);
}
