// Collectives over messages that fail: ranks that disagree, are lost, or give up.
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tests/check.hpp"
#include "tests/collectives/network_fixture.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

// Each changes one thing about a call.
constexpr void (*kDifferences[])(Descriptor& call) = {
    [](Descriptor& call) { call.op = OpKind::kBroadcast; },
    [](Descriptor& call) { call.dtype = Dtype::kInt32; },
    [](Descriptor& call) { call.reduce_op = ReduceOp::kMax; },
    [](Descriptor& call) { call.root = 1; },
    [](Descriptor& call) { call.count = 1; },
    [](Descriptor& call) { call.count = 2000; },
    [](Descriptor& call) { call.sequence += 1; },
};

void a_call_that_differs_fails_on_every_rank_and_changes_nothing() {
  for (const size_t count : {size_t{3}, size_t{1000}}) {
    for (const auto& change : kDifferences) {
      CASE("%zu elements, difference %td", count, &change - kDifferences);
      run_ranks(3, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
        const Descriptor usual = call_of(OpKind::kReduce, Dtype::kFloat32, ReduceOp::kSum, count, 0, 5);
        Descriptor other = usual;
        change(other);
        NetworkGroup group(messages, everybody(rank, 3), kTiny);
        const auto made = TestCall::in_place(rank == 2 ? other : usual, rank);
        const Bytes before = made->array;
        CollectiveCall operation(group.state(), made->request);
        finish(operation, messages, doorbell);
        const Failure* failure = operation.failure();
        CHECK(failure != nullptr && failure->is<Mismatch>() && made->array == before);
        CHECK(failure->as<Mismatch>()->calls.size() == 3 && failure->as<Mismatch>()->calls[0] == usual.describe());
        CHECK(failure->as<Mismatch>()->calls[2] == other.describe());
      });
    }
  }
}

void a_mismatch_is_told_though_one_rank_never_comes() {
  run_ranks(3, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell&) {
    if (rank == 2) return;
    const size_t count = rank == 0 ? 4 : 5;
    const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, count);
    NetworkGroup group(messages, everybody(rank, 3), kTiny);
    const auto made = TestCall::in_place(call, rank);
    CollectiveCall operation(group.state(), made->request);
    while (operation.advance() != Progress::kDone) {
      messages.pump();
      poll(nullptr, 0, 5);
    }
    CHECK(operation.failure()->is<Mismatch>() && operation.failure()->as<Mismatch>()->calls[2] == "nothing yet");
  });
}

void records_from_a_hostile_peer_fail_the_call_only() {
  const std::vector<Bytes> records = {Bytes(0),
                                      Bytes(31),
                                      Bytes(sizeof(Descriptor), std::byte{0xff}),
                                      entry_of(1, Bytes(sizeof(Descriptor) - 1)),
                                      entry_of(0, Bytes(sizeof(Descriptor))),
                                      entry_of(1, Bytes(sizeof(Descriptor), std::byte{0xff})),
                                      Bytes(20'000),
                                      Bytes(90'000)};
  for (const Bytes& record : records) {
    CASE("record %td, of %zu bytes", &record - records.data(), record.size());
    run_ranks(2, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
      if (rank == 1) {
        messages.post(0, kAnnouncements, record);
        if (record.size() <= kEagerBytes) flush(messages);
        return;
      }
      const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 4);
      NetworkGroup group(messages, everybody(rank, 2), kTiny);
      const auto made = TestCall::in_place(call, rank);
      const Bytes before = made->array;
      CollectiveCall operation(group.state(), made->request);
      finish(operation, messages, doorbell);
      CHECK(operation.failure() != nullptr && made->array == before);
    });
  }
}

// World rank 3, which is group rank 0, says how much it keeps itself: the sizes of a pair that concerns nobody else.
void counts_that_no_memory_holds_are_refused_by_every_rank() {
  const Descriptor call = call_of(OpKind::kAllToAll, Dtype::kInt64, ReduceOp::kSum, 0);
  run_ranks(4, LinkKind::kUnixSocket, 0, [&](int world_rank, Messages& messages, Doorbell& doorbell) {
    if (world_rank == 1) return;
    if (world_rank == 3) {
      const uint64_t counts[] = {uint64_t{1} << 60, 0, 0, uint64_t{1} << 60, 0, 0};
      Bytes record(sizeof call + sizeof counts);
      std::memcpy(record.data(), &call, sizeof call);
      std::memcpy(record.data() + sizeof call, counts, sizeof counts);
      for (const int peer : {0, 2}) messages.post(peer, kAnnouncements, entry_of(0, record));
      return flush(messages);
    }
    NetworkGroup group(messages, shuffled_group(world_rank), kTiny);
    TestCall made;
    made.request.descriptor = call;
    made.request.inputs.assign(3, {});
    made.request.outputs.assign(3, {});
    CollectiveCall operation(group.state(), made.request);
    finish(operation, messages, doorbell);
    const Failure* failure = operation.failure();
    CHECK(failure != nullptr && failure->is<Failed>() && failure->as<Failed>()->peer == 0);
    CHECK(failure->as<Failed>()->reason ==
          "it announced that it gives 1152921504606846976 int64 to rank 0, expected less than 2^63 bytes to all ranks "
          "together");
  });
}

// One rank agrees and then dies. A call alone knows only its own links; the group's failure board has the cause. A
// survivor may wait for data that the other one, whose call has failed, never sends: so that one ends the link, too.
void a_rank_lost_in_mid_call_ends_the_call_on_every_survivor() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat64, ReduceOp::kSum, 400'000);
  run_ranks(4, LinkKind::kUnixSocket, 0, [&](int world_rank, Messages& messages, Doorbell& doorbell) {
    if (world_rank == 1) return;
    NetworkGroup group(messages, shuffled_group(world_rank), {.small_bytes = 64, .segment_bytes = 64 * 1024});
    const auto made = TestCall::in_place(call, world_rank);
    CollectiveCall operation(group.state(), made->request);
    if (world_rank == 2) {
      pump_until(messages, doorbell, [&] { return operation.advance() == Progress::kMoved; });
      for (const int peer : {0, 3}) messages.fail_peer(peer, Lost{.peer = peer});
      return;
    }
    finish(operation, messages, doorbell);
    const Failure* failure = operation.failure();
    CHECK(failure != nullptr);
    if (failure->is<Failed>()) return;  // the other survivor was first, and gave its messages up
    const int other = world_rank == 0 ? 3 : 0;
    CHECK(failure->is<Lost>());
    CHECK(failure->as<Lost>()->peer == 2 || failure->as<Lost>()->peer == shuffled_group(world_rank).group_rank(other));
    messages.fail_peer(other, Lost{.peer = other});
  });
}

// Rank 0 cancels its call before rank 1 comes, or while arrays are on their way; the memory may be used for something
// else then.
void a_cancelled_call_touches_no_array() {
  for (const bool in_mid_call : {false, true}) {
    CASE("in mid-call %d", in_mid_call);
    const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, in_mid_call ? 400'000 : 4);
    std::atomic<bool> cancelled{false};
    run_ranks(2, LinkKind::kTcp, 0, [&](int rank, Messages& messages, Doorbell&) {
      NetworkGroup group(messages, everybody(rank, 2), kTiny);
      const auto made = TestCall::in_place(call, rank);
      CollectiveCall operation(group.state(), made->request);
      if (rank == 1) {  // learns of it from the failure board, in a group
        while (!cancelled)
          if (in_mid_call) operation.advance();
        operation.advance();
        return;
      }
      operation.advance();
      for (int moves = 0; in_mid_call && moves < 6;) moves += operation.advance() == Progress::kMoved;
      while (operation.missing().empty() && !operation.is_completed()) operation.advance();  // between two transfers
      CHECK(operation.missing() == std::vector<int>{1});
      operation.give_up(Timeout{});
      CHECK(operation.failure()->is<Timeout>());
      CHECK(operation.failure()->wrote || !in_mid_call);
      Bytes().swap(made->array);
      cancelled = true;
      flush(messages);
    });
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(a_call_that_differs_fails_on_every_rank_and_changes_nothing);
  RUN_TEST(a_mismatch_is_told_though_one_rank_never_comes);
  RUN_TEST(records_from_a_hostile_peer_fail_the_call_only);
  RUN_TEST(counts_that_no_memory_holds_are_refused_by_every_rank);
  RUN_TEST(a_rank_lost_in_mid_call_ends_the_call_on_every_survivor);
  RUN_TEST(a_cancelled_call_touches_no_array);
}
