// Calls of whole engines through shared memory: blocks equal and unequal, small and large, in place, and how calls with
// blocks fail.
#include <string>
#include <vector>

#include "tests/collectives/any_call.hpp"

using namespace procgroup;

namespace {

void run(Group& group, CallKind kind, int64_t number) {
  CASE("%s of %zu elements, even %d, in place %d", op_name(kind.op), kind.count, kind.is_even, kind.in_place);
  AnyCall call(kind, number, group.rank(), group.size());
  int before = 0;
  int after = 0;
  call.request().before = [&] { ++before; };
  call.request().after = [&] { ++after; };
  NoRuntime language;
  group.calls().run(call.request(), 60, language);
  check(call.is_right(), "wrong numbers", group.rank());
  check(before == 1 && after == 1, "before and after run once", group.rank());
}

// What `before` puts into the array is what the others get.
void before_runs_first(Group& group, size_t count) {
  std::vector<int64_t> data(count);
  Request request = request_for(OpKind::kAllReduce, data);
  std::vector<int64_t> scratch;
  request.before = [&] { request.input = (scratch = values(group.rank(), count)).data(); };
  NoRuntime language;
  group.calls().run(request, 60, language);
  for (size_t index = 0; index < count; ++index) check(data[index] == sum(group.size(), index), "before", group.rank());
}

// Every rank, also one that has no part in it, reports the same pair; no output is written.
void unequal_pairs_are_a_mismatch(int size, size_t count) {
  CASE("%zu elements", count);
  const CallKind kind{.op = OpKind::kAllToAll, .count = count};
  const size_t given = AnyCall(kind, 1, 0, size).request().inputs[1].count;
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [&](Group& group) {
    AnyCall call(kind, 1, group.rank(), size);
    bool went_well = false;
    call.request().after = [&] { went_well = true; };
    if (group.rank() == 1) call.request().outputs[0].count += 1;
    const std::vector<Array> untouched = call.outputs();
    NoRuntime language;
    try {
      group.calls().run(call.request(), 60, language);
      check(false, "expected a mismatch", group.rank());
    } catch (const OperationFailed& failed) {
      const std::string expected = "rank 0 gives " + std::to_string(given) + " int64 to rank 1, which expects " +
                                   std::to_string(given + 1) + " int64 from it";
      check(failed.failure.is<Mismatch>(), "kind of a mismatch", group.rank());
      check(failed.failure.as<Mismatch>()->reason == expected, failed.failure.as<Mismatch>()->reason.c_str(),
            group.rank());
    }
    check(call.outputs() == untouched && !went_well, "a mismatch changed an array", group.rank());
  });
}

void everything(int size, ReadingRanges reading) {
  CASE("read from %zu bytes on", reading.of(OpKind::kGather).from);
  std::vector<Rank> world = make_world(size, reading);
  in_all_ranks(world, [](Group& group) {
    int64_t number = 0;
    for (const size_t count : {0, 1, 2, 6, 7, 31, 32, 127, 999, 3001}) {
      for (const OpKind op : kAllOps) {
        const bool may_be_uneven = op == OpKind::kAllGather || op == OpKind::kReduceScatter;
        const bool may_be_in_place = op == OpKind::kAllGather || op == OpKind::kScatter;
        const int root = static_cast<int>(count % static_cast<size_t>(group.size()));
        for (const bool is_even : {false, true})
          for (const bool in_place : {false, true})
            if ((may_be_uneven || !is_even) && (may_be_in_place || !in_place))
              run(group, {.op = op, .count = count, .root = root, .is_even = is_even, .in_place = in_place}, ++number);
      }
      before_runs_first(group, count);
    }
  });
  for (Rank& rank : world) rank.group->leave();
  for (Rank& rank : world) rank.engine->shutdown();
}

}  // namespace

int main() {
  for (const int size : {1, 2, 3, 4, 7}) {
    CASE("%d ranks", size);
    RUN_TEST(everything, size, ReadingRanges::all({}));           // through slots
    RUN_TEST(everything, size, ReadingRanges::all({.from = 0}));  // in place
    if (size == 1) continue;
    for (const size_t count : {2, 3001}) RUN_TEST(unequal_pairs_are_a_mismatch, size, count);
  }
}
