// Small calls with a root on one host, in which a rank waits for nobody whose data it does not use: ranks that run
// ahead of each other at their own speed, one that leaves meanwhile, and differing calls that nobody had to compare.
#include <cstdio>
#include <random>
#include <vector>

#include "tests/collectives/any_call.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr size_t kCalls = 2000;

// In rows of small calls in which the same ranks give there is now and then another one.
CallKind any_kind(std::mt19937& random, size_t number, int size) {
  constexpr OpKind kRooted[] = {OpKind::kBroadcast, OpKind::kScatter, OpKind::kReduce, OpKind::kGather};
  if (random() % 40 == 0)
    return {.op = kAllOps[random() % std::size(kAllOps)],
            .count = 20,
            .root = static_cast<int>(random() % static_cast<unsigned>(size))};
  return {.op = kRooted[number / 100 % 2 * 2 + random() % 2], .count = random() % 40 == 0 ? 20 : size_t{1}};
}

void ranks_run_ahead_of_each_other() {
  for (const int size : {2, 3, 4}) {
    std::vector<Rank> world = make_world(size);
    in_all_ranks(world, [&](Group& group) {
      NoRuntime language;
      std::mt19937 same(testing::test_seed(3));
      std::mt19937 own(static_cast<unsigned>(group.rank()));
      for (size_t number = 0; number < kCalls; ++number) {
        const CallKind kind = any_kind(same, number, size);
        CASE("call %zu, %s of %zu elements, root %d", number, op_name(kind.op), kind.count, kind.root);
        if (own() % 100 == 0) std::this_thread::yield();
        AnyCall call(kind, static_cast<int64_t>(number), group.rank(), size);
        if (own() % 10 == 0) {
          const auto operation = group.calls().start(call.request(), 60);
          while (!operation->is_completed()) group.advance_pending();
          CHECK(operation->failure() == nullptr);
        } else {
          group.calls().run(call.request(), 60, language);
        }
        CHECK(call.is_right());
      }
    });
  }
}

// The root has left, and its group is gone, before the others have made its last calls.
void a_root_may_leave_after_its_last_call() {
  std::vector<Rank> world = make_world(3);
  for (const int rank : {0, 1, 2}) {
    Group& group = *world[static_cast<size_t>(rank)].group;
    NoRuntime language;
    for (int64_t number = 0; number < static_cast<int64_t>(kAnnouncements); ++number) {
      AnyCall call({.op = OpKind::kBroadcast, .count = 2}, number, rank, 3);
      group.calls().run(call.request(), 60, language);
      CHECK(call.is_right());
    }
    world[static_cast<size_t>(rank)].group.reset();
  }
}

// The root takes nothing in a broadcast, nor does rank 1 in a reduce to the root.
void make_different_calls(std::vector<Rank>& world) {
  NoRuntime language;
  const CallKind kinds[] = {{.op = OpKind::kBroadcast, .count = 1}, {.op = OpKind::kReduce, .count = 1}};
  for (const int rank : {0, 1}) {
    AnyCall call(kinds[rank], 0, rank, 2);
    world[static_cast<size_t>(rank)].group->calls().run(call.request(), 60, language);
  }
}

void a_mismatch_is_found_in_a_later_call() {
  std::vector<Rank> world = make_world(2);
  make_different_calls(world);
  in_all_ranks(world, [](Group& group) {
    NoRuntime language;
    AnyCall call({.op = OpKind::kAllReduce, .count = 1}, 1, group.rank(), 2);
    try {
      group.calls().run(call.request(), 60, language);
      check(false, "expected a mismatch", group.rank());
    } catch (const OperationFailed& failed) {
      CHECK(failed.failure.is<Mismatch>());
      CHECK_EQUAL(failed.failure.call.sequence, uint64_t{1});
      CHECK(failed.failure.call.op == (group.rank() == 0 ? OpKind::kBroadcast : OpKind::kReduce));
      CHECK_EQUAL(failed.failure.as<Mismatch>()->calls.size(), size_t{2});
    }
  });
}

void a_mismatch_is_found_by_a_rank_that_leaves() {
  std::vector<Rank> world = make_world(2);
  make_different_calls(world);
  for (Rank& rank : world) {
    rank.group->leave();
    const std::optional<OperationFailed> failed = rank.group->end().take_unraised();
    CHECK(failed && failed->failure.is<Mismatch>() && failed->call.sequence == 1);
  }
}

}  // namespace

int main() {
  RUN_TEST(ranks_run_ahead_of_each_other);
  RUN_TEST(a_root_may_leave_after_its_last_call);
  RUN_TEST(a_mismatch_is_found_in_a_later_call);
  RUN_TEST(a_mismatch_is_found_by_a_rank_that_leaves);
}
