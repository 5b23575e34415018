// Collectives and messages of whole engines, and how their calls fail.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

std::vector<int> members_of(int size) {
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

void collectives(Group& group, size_t count) {
  CASE("%zu elements", count);
  NoRuntime language;
  const int size = group.size();
  const int root = static_cast<int>(count % static_cast<size_t>(size));
  std::vector<int64_t> data = values(group.rank(), count);
  Request all_reduce = request_for(OpKind::kAllReduce, data);
  group.calls().run(all_reduce, 60, language);
  for (size_t index = 0; index < count; ++index) check(data[index] == sum(size, index), "all_reduce", group.rank());

  data = values(group.rank(), count);
  Request reduce = request_for(OpKind::kReduce, data, root);
  group.calls().run(reduce, 60, language);
  for (size_t index = 0; index < count; ++index)
    check(data[index] == (group.rank() == root ? sum(size, index) : value(group.rank(), index)), "reduce",
          group.rank());

  data = values(group.rank(), count);
  Request broadcast = request_for(OpKind::kBroadcast, data, root);
  group.calls().run(broadcast, 60, language);
  for (size_t index = 0; index < count; ++index) check(data[index] == value(root, index), "broadcast", group.rank());

  data = values(group.rank(), count);
  std::vector<std::vector<int64_t>> gathered(static_cast<size_t>(size), std::vector<int64_t>(count));
  Request all_gather = request_for(OpKind::kAllGather, data);
  for (std::vector<int64_t>& output : gathered) all_gather.outputs.push_back({output.data(), output.size()});
  group.calls().run(all_gather, 60, language);
  for (int rank = 0; rank < size; ++rank)
    check(gathered[static_cast<size_t>(rank)] == values(rank, count), "all_gather", rank);

  Request barrier;
  group.calls().run(barrier, 60, language);
}

void asynchronous_calls_keep_their_order(Group& group) {
  NoRuntime language;
  std::vector<std::vector<int64_t>> arrays(8, values(group.rank(), 700));
  std::vector<std::shared_ptr<GroupOperation>> operations;
  for (std::vector<int64_t>& data : arrays)
    operations.push_back(group.calls().start(request_for(OpKind::kAllReduce, data), 60));
  std::vector<int64_t> last = values(group.rank(), 3);
  Request blocking = request_for(OpKind::kAllReduce, last);
  group.calls().run(blocking, 60, language);
  for (const auto& operation : operations)
    check(operation->is_completed() && !operation->failure(), "queued", group.rank());
  for (const std::vector<int64_t>& data : arrays) check(data[5] == sum(group.size(), 5), "queued sum", group.rank());
}

// Where no core is to spare the caller runs its asynchronous calls itself, as long as they move. What then waits for
// other ranks goes on without it: so calls of two groups may be issued in opposite orders.
void the_caller_runs_along(int size) {
  std::vector<Rank> world = make_world(size);
  std::vector<std::unique_ptr<Group>> others;
  std::vector<uint64_t> offsets;
  for (const Rank& rank : world) {
    others.push_back(std::make_unique<Group>(
        *rank.engine,
        GroupOptions{
            .id = 8, .name = "other", .members = members_of(size), .rank = rank.group->rank(), .layout = kTiny}));
    offsets.push_back(others.back()->members().offset());
  }
  for (const std::unique_ptr<Group>& other : others) other->attach(offsets, std::vector<int>(offsets.size()));
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    Group* order[] = {&group, others[static_cast<size_t>(group.rank())].get()};
    if (group.rank() % 2 == 1) std::swap(order[0], order[1]);
    for (const size_t count : {3, 700, 5000}) {
      CASE("%zu elements", count);
      std::vector<std::vector<int64_t>> arrays(6, values(group.rank(), count));
      std::vector<std::shared_ptr<GroupOperation>> operations;
      for (size_t index = 0; index < arrays.size(); ++index)
        operations.push_back(
            order[index % 2]->calls().start(request_for(OpKind::kAllReduce, arrays[index]), 60, &language));
      for (size_t index = 0; index < arrays.size(); ++index) {
        const CallQueue::Outcome outcome =
            order[index % 2]->calls().await(*operations[index], Deadline::after(60), language);
        check(outcome.has_completed && !outcome.failure, "expected to have completed", group.rank());
      }
      for (const std::vector<int64_t>& data : arrays)
        check(data[2] == sum(size, 2), "sum of a call that was run along", group.rank());
    }
  });
}

// One thread leaves the group while another issues calls, and waits along for ranks that do not come.
void leaving_ends_what_a_caller_runs_along() {
  std::vector<Rank> world = make_world(2);
  Group& group = *world[0].group;
  std::vector<int64_t> data(4);
  std::vector<std::shared_ptr<GroupOperation>> operations;
  std::thread caller([&] {
    NoRuntime language;
    try {
      for (;;) operations.push_back(group.calls().start(request_for(OpKind::kAllReduce, data), 60, &language));
    } catch (const OperationFailed& failed) {
      check(failed.failure.is<Broken>(), "expected a group that was left", 0);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  group.leave();
  caller.join();
  for (const auto& operation : operations) check(operation->is_completed(), "expected to have completed", 0);
}

void messages(Group& group, size_t count) {
  CASE("messages of %zu elements", count);
  NoRuntime language;
  const int next = (group.rank() + 1) % group.size();
  const int previous = (group.rank() + group.size() - 1) % group.size();
  std::vector<int64_t> out = values(group.rank(), count);
  std::vector<int64_t> in(count);
  const auto sending = group.messages().start({OpKind::kSend, out.data(), count, Dtype::kInt64, next, 3}, 60);
  const int source = group.messages().run({OpKind::kRecv, in.data(), count, Dtype::kInt64, previous, 3}, 60, language);
  check(source == previous && in == values(previous, count), "message", group.rank());
  while (!sending->is_completed()) std::this_thread::yield();
}

// Arrays in the ranks' arenas are read in place; when one rank's is elsewhere, the result is the same.
void arrays_in_arenas(int size, bool everywhere) {
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    Arena& arena = world[static_cast<size_t>(group.rank())].engine->arena();
    for (const size_t count : {33, 1000, 1001, 300'001}) {
      CASE("%zu elements, all arrays in arenas %d", count, everywhere);
      const size_t bytes = count * sizeof(int64_t);
      const std::vector<int64_t> mine = values(group.rank(), count);
      std::vector<int64_t> elsewhere(count);
      const uint64_t offset = arena.allocate(bytes);
      std::byte* place = arena.at(offset, bytes);
      if (!everywhere && group.rank() == 1) place = reinterpret_cast<std::byte*>(elsewhere.data());
      std::memcpy(place, mine.data(), bytes);
      Request request = request_for(OpKind::kAllReduce, elsewhere);
      request.input = request.output = place;
      group.calls().run(request, 60, language);
      const auto* result = reinterpret_cast<const int64_t*>(place);
      for (size_t index = 0; index < count; ++index) check(result[index] == sum(size, index), "in arena", group.rank());
      arena.release(offset);
    }
  });
}

FailureKind kind_of_failure(Group& group, Request request, double seconds) {
  NoRuntime language;
  try {
    group.calls().run(request, seconds, language);
  } catch (const OperationFailed& failed) {
    return failed.failure.kind();
  }
  check(false, "expected a failure", group.rank());
  std::abort();
}

void mismatch_changes_nothing(int size) {
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 500);
    const ReduceOp op = group.rank() == 1 ? ReduceOp::kMax : ReduceOp::kSum;
    const FailureKind kind = kind_of_failure(group, request_for(OpKind::kAllReduce, data, -1, op), 60);
    check(kind == FailureKind::kMismatch, "expected a mismatch", group.rank());
    check(data == values(group.rank(), 500), "a mismatch changed an array", group.rank());
    check(kind_of_failure(group, {}, 60) == FailureKind::kBroken, "expected a broken group", group.rank());
  });
}

// Reports of other ranks, and `procgroup explain`, read there for whom a rank waits.
void a_call_records_the_world_ranks_that_it_awaits() {
  std::vector<Rank> world = make_world(4);
  const std::vector<int> members{1, 2, 3};
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<uint64_t> offsets;
  for (int rank = 0; rank < 3; ++rank) {
    groups.push_back(std::make_unique<Group>(
        *world[static_cast<size_t>(members[static_cast<size_t>(rank)])].engine,
        GroupOptions{.id = 8, .name = "others", .members = members, .rank = rank, .layout = kTiny}));
    offsets.push_back(groups.back()->members().offset());
  }
  for (const std::unique_ptr<Group>& group : groups) group->attach(offsets, {0, 0, 0});
  std::vector<int64_t> data(4);
  const auto operation = groups[0]->calls().start(request_for(OpKind::kAllReduce, data), 600);
  Descriptor call;
  call.op = OpKind::kAllReduce, call.group = 8, call.sequence = 1;
  AwaitedRanks awaited;
  for (const Deadline guard = Deadline::after(60); awaited.count == 0 && !guard.passed();) {
    groups[0]->advance_pending();
    groups[0]->examine_pending();
    awaited = world[1].engine->record().view().awaited(call);
  }
  CHECK_EQUAL(awaited.ranks, (std::vector<int>{2, 3}));
}

void timeout_and_leaving(int size) {
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [](Group& group) {
    std::vector<int64_t> data(4);
    if (group.rank() == 0) {
      group.leave();
      return;
    }
    const FailureKind kind = kind_of_failure(group, request_for(OpKind::kAllReduce, data), 5);
    check(kind == FailureKind::kLost, "expected that rank 0 has left", group.rank());
  });
  std::vector<Rank> late = make_world(size);
  in_all_ranks(late, [](Group& group) {
    std::vector<int64_t> data(4);
    if (group.rank() == 0) return;
    const FailureKind kind = kind_of_failure(group, request_for(OpKind::kAllReduce, data), 0.2);
    check(kind == FailureKind::kTimeout || kind == FailureKind::kFailed, "expected a timeout", group.rank());
  });
}

// The first call waits for rank 1, and the second one, which fails at its deadline, for its turn.
void no_call_is_queued_behind_one_that_has_failed() {
  std::vector<Rank> world = make_world(2);
  Group& group = *world[0].group;
  std::vector<int64_t> data(4);
  const auto first = group.calls().start(request_for(OpKind::kAllReduce, data), 600);
  const auto second = group.calls().start(request_for(OpKind::kAllReduce, data), 0.01);
  while (!second->is_completed()) std::this_thread::yield();
  CHECK(second->failure()->is<Timeout>() && !first->is_completed());
  // A caller that has not been told of the second one gets its error first.
  CHECK(kind_of_failure(group, request_for(OpKind::kAllReduce, data), 600) == FailureKind::kTimeout);
  CHECK(kind_of_failure(group, request_for(OpKind::kAllReduce, data), 600) == FailureKind::kBroken);
  CHECK(!first->is_completed());
}

void calls_of_every_size(int size) {
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [](Group& group) {
    for (const size_t count : {0, 1, 5, 32, 33, 100, 999, 1000, 1001, 3001}) collectives(group, count);
    asynchronous_calls_keep_their_order(group);
    for (const size_t count : {0, 1, 1000, 40'000}) messages(group, count);
    for (int repeat = 0; repeat < 200; ++repeat) collectives(group, 7);
  });
  for (Rank& rank : world) rank.group->leave();
  for (Rank& rank : world) rank.engine->shutdown();
}

void collectives_that_read_in_place(int size) {
  std::vector<Rank> reading = make_world(size, ReadingRanges::all({.from = 0}));
  in_all_ranks(reading, [](Group& group) {
    for (const size_t count : {33, 1000, 3001}) collectives(group, count);
  });
}

// Bound to one core each, ranks first know only their own cores, and then those of their host.
void a_rank_waits_by_the_cores_that_it_was_told_last() {
  Engine engine(EngineOptions{.rank = 0, .world_size = 2, .ranks_are_threads = true}, true);
  const int64_t with_a_core = engine.policy().spin_ns;
  engine.set_cores(1, 2);
  check(engine.policy().oversubscribed && engine.policy().spin_ns < with_a_core, "fewer cores than ranks", 0);
  engine.set_cores(2, 2);
  check(!engine.policy().oversubscribed && engine.policy().spin_ns == with_a_core, "a core for each rank", 0);
}

}  // namespace

int main() {
  for (const int size : {2, 3, 4}) {
    CASE("%d ranks", size);
    RUN_TEST(calls_of_every_size, size);
    for (const bool everywhere : {true, false}) RUN_TEST(arrays_in_arenas, size, everywhere);
    RUN_TEST(collectives_that_read_in_place, size);
    RUN_TEST(mismatch_changes_nothing, size);
    RUN_TEST(timeout_and_leaving, size);
    RUN_TEST(the_caller_runs_along, size);
  }
  RUN_TEST(a_rank_waits_by_the_cores_that_it_was_told_last);
  RUN_TEST(leaving_ends_what_a_caller_runs_along);
  RUN_TEST(no_call_is_queued_behind_one_that_has_failed);
  RUN_TEST(a_call_records_the_world_ranks_that_it_awaits);
}
