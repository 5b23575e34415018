// Collectives over messages: every op against the reduce kernel, over every link.
#include <random>
#include <vector>

#include "tests/check.hpp"
#include "tests/collectives/network_fixture.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

Bytes reduced(const Descriptor& call, int size) {
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(input_of(call.dtype, call.count, rank));
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes out(call.bytes());
  if (call.count > 0) reduce(call.dtype, call.reduce_op, out.data(), sources.data(), size, call.count);
  return out;
}

struct CallCase {
  Descriptor call;
  bool in_place;
};

std::vector<CallCase> cases_for(int size) {
  const size_t ranks = static_cast<size_t>(size);
  std::vector<CallCase> cases;
  uint64_t sequence = 0;
  const auto add = [&](OpKind op, Dtype dtype, ReduceOp reduce_op, size_t count, int root = -1) {
    ++sequence;
    const bool in_place = op == OpKind::kBroadcast || sequence % 2 == 0;  // a broadcast has one array
    cases.push_back({call_of(op, dtype, reduce_op, count, root, sequence), in_place});
  };
  for (const size_t count : {size_t{0}, size_t{1}, ranks - 1, ranks, size_t{97}, size_t{3001}}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16, Dtype::kInt64, Dtype::kUint8}) {
      add(OpKind::kAllReduce, dtype, ReduceOp::kSum, count);
    }
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16}) {
      add(OpKind::kAllReduce, dtype, ReduceOp::kAvg, count);
      add(OpKind::kAllReduce, dtype, ReduceOp::kMax, count);
    }
    add(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kProduct, count);
    add(OpKind::kReduce, Dtype::kFloat16, ReduceOp::kSum, count, size - 1);
    add(OpKind::kReduce, Dtype::kFloat32, ReduceOp::kAvg, count, 0);
    add(OpKind::kBroadcast, Dtype::kInt64, ReduceOp::kSum, count, static_cast<int>(count) % size);
    add(OpKind::kBarrier, Dtype::kUint8, ReduceOp::kSum, 0);
  }
  return cases;
}

// The output of an op with one array: what it must be on this rank, given what it was before.
Bytes expected_output(const Descriptor& call, int rank, int size, const Bytes& before) {
  if (call.op == OpKind::kBroadcast) return input_of(call.dtype, call.count, call.root);
  const bool written = call.op == OpKind::kAllReduce || (call.op == OpKind::kReduce && rank == call.root);
  return written ? reduced(call, size) : before;
}

void check_case(const CallCase& entry, NetworkGroup& group, Messages& messages, Doorbell& doorbell) {
  const Descriptor& call = entry.call;
  CASE("%s, root %d, in place %d", call.describe().c_str(), call.root, entry.in_place);
  const auto made = TestCall::in_place(call, group.group().rank);
  const Bytes original = made->array;
  Bytes separate(original.size(), std::byte{0x5a});
  Bytes& output = entry.in_place ? made->array : separate;
  made->request.output = output.data();
  const Bytes before = output;
  CollectiveCall operation(group.state(), made->request);
  finish(operation, messages, doorbell);
  CHECK(operation.failure() == nullptr);
  CHECK_EQUAL(output, expected_output(call, group.group().rank, group.group().size(), before));
  CHECK(entry.in_place || made->array == original);
}

void every_op_gives_what_the_kernel_gives() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int size : {1, 2, 3, 4, 7}) {
      const std::vector<CallCase> cases = cases_for(size);
      run_ranks(size, kind, 16 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
        NetworkGroup group(messages, everybody(rank, size), kTiny);
        for (const CallCase& entry : cases) check_case(entry, group, messages, doorbell);
      });
    }
  }
}

void default_limits_carry_a_large_array() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 1'000'003);
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    run_ranks(3, kind, 64 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
      NetworkGroup group(messages, everybody(rank, 3));
      const auto made = TestCall::in_place(call, rank);
      CollectiveCall operation(group.state(), made->request);
      finish(operation, messages, doorbell);
      CHECK(operation.failure() == nullptr && made->array == reduced(call, 3));
    });
  }
}

// Values whose sums depend on the order: all ranks get the bits of the kernel, which keeps the order of the ranks.
void results_are_those_of_the_kernel_to_the_bit() {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    for (const size_t count : {size_t{13}, size_t{5000}}) {
      CASE("%zu %s", count, dtype_name(dtype));
      const Descriptor call = call_of(OpKind::kAllReduce, dtype, ReduceOp::kAvg, count);
      std::vector<Bytes> inputs(4, Bytes(call.bytes()));
      std::vector<const void*> sources;
      std::mt19937 random(1);
      for (Bytes& input : inputs) {
        for (std::byte& byte : input) byte = static_cast<std::byte>(random() & 0x3f);
        sources.push_back(input.data());
      }
      Bytes expected(call.bytes());
      reduce(dtype, ReduceOp::kAvg, expected.data(), sources.data(), 4, count);
      run_ranks(4, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
        NetworkGroup group(messages, everybody(rank, 4), kTiny);
        const auto made = TestCall::in_place(call, rank);
        made->array = inputs[static_cast<size_t>(rank)];
        made->request.input = made->request.output = made->array.data();
        CollectiveCall operation(group.state(), made->request);
        finish(operation, messages, doorbell);
        CHECK(operation.failure() == nullptr && made->array == expected);
      });
    }
  }
}

void a_group_may_list_its_members_in_any_order() {
  const Descriptor call = call_of(OpKind::kBroadcast, Dtype::kInt64, ReduceOp::kSum, 500, 1);
  run_ranks(4, LinkKind::kTcp, 0, [&](int world_rank, Messages& messages, Doorbell& doorbell) {
    if (world_rank == 1) return;
    NetworkGroup group(messages, shuffled_group(world_rank), kTiny);
    const auto made = TestCall::in_place(call, world_rank);
    CollectiveCall operation(group.state(), made->request);
    finish(operation, messages, doorbell);
    CHECK(operation.failure() == nullptr && made->array == input_of(call.dtype, call.count, 0));
  });
}

// By which a leader knows that its call waits for others alone: see Watch::awaited.
void a_leader_has_work_until_it_has_taken_what_has_arrived() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kInt64, ReduceOp::kSum, 5);
  run_ranks(2, LinkKind::kTcp, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
    NetworkGroup group(messages, everybody(rank, 2));
    const auto made = TestCall::in_place(call, rank);
    CollectiveCall operation(group.state(), made->request);
    const Relay& relay = *group.state().relay;
    if (rank == 0) {
      CHECK(relay.has_work(group.state(), 1));
      while (operation.advance() == Progress::kMoved) {
      }
      CHECK(!relay.has_work(group.state(), 1));
      CHECK(!operation.is_completed() && operation.missing() == std::vector<int>{1});
      messages.post(1, {kGroup, 5}, Bytes(1));
      pump_until(messages, doorbell, [&] { return relay.has_work(group.state(), 1); });
      CHECK(operation.missing() == std::vector<int>{1});
    } else {
      std::byte go{};
      const auto told = messages.receive_up_to(0, {kGroup, 5}, &go, 1);
      pump_until(messages, doorbell, [&] { return told->is_completed(); });
    }
    finish(operation, messages, doorbell);
    CHECK(operation.failure() == nullptr && !relay.has_work(group.state(), 1));
  });
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_op_gives_what_the_kernel_gives);
  RUN_TEST(default_limits_carry_a_large_array);
  RUN_TEST(results_are_those_of_the_kernel_to_the_bit);
  RUN_TEST(a_group_may_list_its_members_in_any_order);
  RUN_TEST(a_leader_has_work_until_it_has_taken_what_has_arrived);
}
