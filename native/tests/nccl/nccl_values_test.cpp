// What NCCL's calls give, on streams behind gates and without them. CMake runs the same program with stand-ins that do
// what GPUs may do: no words of memory to wait for, few channels, completions that come late and many at once.
#include "tests/nccl/nccl_fixture.hpp"

using namespace procgroup;

namespace {

constexpr size_t kCount = 40;

std::vector<DeviceSpan> blocks_of(const DeviceArray& array, int blocks, bool are_apart) {
  // Apart: in the other order.
  std::vector<DeviceSpan> spans;
  for (int block = 0; block < blocks; ++block) {
    const int place = are_apart ? blocks - 1 - block : block;
    spans.push_back(array.part(static_cast<size_t>(place) * kCount, kCount));
  }
  return spans;
}

// Block `place` of a rank.
std::vector<int64_t> block_of(int rank, int place) {
  std::vector<int64_t> block = values(rank, kCount);
  for (int64_t& one : block) one += 10'000 * place;
  return block;
}

std::vector<int64_t> joined(const std::vector<std::vector<int64_t>>& blocks, bool are_apart = false) {
  std::vector<int64_t> all;
  for (const auto& block : blocks) all.insert(are_apart ? all.begin() : all.end(), block.begin(), block.end());
  return all;
}

std::vector<int64_t> expected_of(OpKind op, int rank, int size, bool are_apart) {
  const int root = size - 1;
  if (op == OpKind::kBroadcast) return values(root, kCount);
  if (op == OpKind::kScatter) return block_of(root, rank);
  if (reduces(op)) {
    std::vector<int64_t> sums(kCount);
    for (size_t index = 0; index < kCount; ++index)
      sums[index] = sum(size, index) + (has_input_blocks(op) ? int64_t{10'000} * rank * size : 0);
    return sums;
  }
  std::vector<std::vector<int64_t>> blocks;
  for (int from = 0; from < size; ++from)
    blocks.push_back(has_input_blocks(op) ? block_of(from, rank) : values(from, kCount));
  return joined(blocks, are_apart);
}

std::vector<int64_t> given_by(OpKind op, int rank, int size, bool are_apart) {
  if (!has_input_blocks(op)) return values(rank, kCount);
  std::vector<std::vector<int64_t>> blocks;
  for (int to = 0; to < size; ++to) blocks.push_back(block_of(rank, to));
  return joined(blocks, are_apart);
}

struct Move {
  OpKind op;
  bool are_apart = false;
};
constexpr Move kMoves[] = {
    {OpKind::kAllReduce},       {OpKind::kReduce},        {OpKind::kBroadcast},           {OpKind::kAllGather},
    {OpKind::kAllGather, true}, {OpKind::kReduceScatter}, {OpKind::kReduceScatter, true}, {OpKind::kGather},
    {OpKind::kScatter},         {OpKind::kAllToAll}};

// Each call in turn, on streams of its own and again on the program's: `stays`. The last rank is the root.
void every_collective(NcclRank& mine, bool stays) {
  const int size = mine.size(), rank = mine.rank(), root = size - 1;
  const CudaStream stream = mine.make_stream();
  const auto make = [&](OpKind op, std::vector<DeviceSpan> inputs, std::vector<DeviceSpan> outputs) {
    const bool is_rooted = row_of(op).givers == Ranks::kRoot || row_of(op).takers == Ranks::kRoot;
    const IssuedCall issued =
        mine.issue({op, Dtype::kInt64, ReduceOp::kSum, 1, is_rooted ? root : -1, std::move(inputs), std::move(outputs)},
                   {stream}, stays);
    if (!stays || !issued.task->may_have_written()) issued.expect_success(rank);  // without a gate the host waits
    if (!stays) issued.task->let_wait({stream});
    return issued;
  };
  for (const auto [op, are_apart] : kMoves) {
    CASE("%s%s", op_name(op), are_apart ? " of blocks that are apart" : "");
    const bool in_place = op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kBroadcast;
    const int inputs = has_input_blocks(op) ? size : 1, outputs = has_output_blocks(op) ? size : 1;
    DeviceArray given(mine.gpu(), stream, kCount * static_cast<size_t>(inputs));
    DeviceArray taken(mine.gpu(), stream, kCount * static_cast<size_t>(outputs));
    given.write(given_by(op, rank, size, are_apart));
    const DeviceArray& result = in_place ? given : taken;
    const bool gets = op == OpKind::kBroadcast ? rank != root : takes(op, rank, root);
    std::vector<DeviceSpan> from, to;
    if (gives(op, rank, root)) from = blocks_of(given, inputs, are_apart);
    if (gets || op == OpKind::kReduce) to = blocks_of(result, outputs, are_apart);
    const IssuedCall call = make(op, from, to);
    const std::vector<int64_t> got = result.read();
    if (gets || op == OpKind::kBroadcast) CHECK_EQUAL(got, expected_of(op, rank, size, are_apart));
    call.expect_success(rank);
  }
  CASE("all_reduce of two arrays");
  DeviceArray one(mine.gpu(), stream, kCount), two(mine.gpu(), stream, kCount);
  for (DeviceArray* array : {&one, &two}) array->write(values(rank, kCount));
  const IssuedCall call = make(OpKind::kAllReduce, {one.span(), two.span()}, {one.span(), two.span()});
  for (DeviceArray* array : {&one, &two})
    CHECK_EQUAL(array->read(), expected_of(OpKind::kAllReduce, rank, size, false));
  call.expect_success(rank);
  mine.destroy(stream);
}

void collectives_give_what_they_promise(int size, bool may_gate, const std::vector<int>& hosts) {
  NcclWorld world(size, may_gate, hosts);
  world.in_all_ranks([&](NcclRank& mine) {
    for (const bool stays : {false, true}) {
      CASE("on %s", stays ? "the program's stream" : "a stream of the group's");
      every_collective(mine, stays);
    }
  });
}

// To the next rank, from the one before; two tags in one order and in the other.
void messages_give_what_they_promise(int size, bool may_gate, const std::vector<int>& hosts) {
  NcclWorld world(size, may_gate, hosts);
  world.in_all_ranks([&](NcclRank& mine) {
    const CudaStream stream = mine.make_stream();
    const int next = (mine.rank() + 1) % size, before = (mine.rank() + size - 1) % size;
    for (int round = 0; round < 4; ++round) {
      DeviceArray given(mine.gpu(), stream, 2 * kCount), taken(mine.gpu(), stream, 2 * kCount);
      given.write(joined({block_of(mine.rank(), 1), block_of(mine.rank(), 2)}));
      std::vector<IssuedCall> calls;
      for (const uint64_t tag : {0, 1})
        calls.push_back(mine.issue_message(OpKind::kSend, given.part(tag * kCount, kCount), next, tag, {stream}));
      for (const uint64_t tag : {1, 0})
        calls.push_back(mine.issue_message(OpKind::kRecv, taken.part(tag * kCount, kCount), before, tag, {stream}));
      for (const IssuedCall& call : calls) call.expect_success(mine.rank());
      for (const IssuedCall& call : calls) call.task->let_wait({stream});
      CHECK_EQUAL(taken.read(), joined({block_of(before, 1), block_of(before, 2)}));
    }
    mine.destroy(stream);
  });
}

// A message waits for what its array's stream does, and later work of that stream for the message.
void messages_and_collectives_have_the_order_of_their_streams(bool may_gate) {
  NcclWorld world(2, may_gate);
  world.in_all_ranks([&](NcclRank& mine) {
    const CudaStream stream = mine.make_stream();
    DeviceArray array(mine.gpu(), stream, kCount);
    array.write(values(0, kCount));
    std::vector<IssuedCall> calls;
    std::vector<int64_t> expected = values(0, kCount);
    for (int round = 0; round < 20; ++round) {
      calls.push_back(mine.issue(mine.all_reduce(array), {stream}));
      if (!calls.back().task->may_have_written()) calls.back().expect_success(mine.rank());
      const OpKind op = (mine.rank() == 0) == (round % 2 == 0) ? OpKind::kSend : OpKind::kRecv;
      const IssuedCall message = mine.issue_message(op, array.span(), 1 - mine.rank(), 0, {stream});
      message.expect_success(mine.rank());
      message.task->let_wait({stream});
      for (int64_t& one : expected) one *= 2;
    }
    CHECK_EQUAL(array.read(), expected);
    for (const IssuedCall& call : calls) call.expect_success(mine.rank());
    mine.destroy(stream);
  });
}

void one_rank_alone() {
  NcclWorld world(1);
  world.in_all_ranks([&](NcclRank& mine) { every_collective(mine, true); });
}

// Where one rank may gate and the other may not, NCCL gets the same calls in the same order on both.
void ranks_with_and_without_gates_understand_each_other() {
  NcclWorld world(2);
  const auto ungated = std::make_shared<NcclBackend>(1, 2, 1, false);
  ungated->on_first_call([] { return std::make_shared<const NcclLibrary>(""); });
  ungated->on_connect(
      [&](NcclBackend::Pair ranks) { return std::make_shared<ConnectTask>(*ungated, world.meeting, ranks); });
  ungated->load();
  world.in_all_ranks([&](NcclRank& given) {
    NcclRank other(given.group, ungated);
    NcclRank& mine = given.rank() == 1 ? other : given;
    const CudaStream stream = mine.make_stream();
    DeviceArray array(mine.gpu(), stream, kCount);
    array.write(values(0, kCount));
    std::vector<IssuedCall> calls;
    std::vector<int64_t> expected = values(0, kCount);
    for (int round = 0; round < 30; ++round) {
      calls.push_back(mine.issue(mine.all_reduce(array), {stream}));
      CHECK(round == 0 || calls.back().task->may_have_written() == (mine.rank() == 0) || !mine.gpu().has_words());
      if (!calls.back().task->may_have_written()) calls.back().expect_success(mine.rank());
      for (int64_t& one : expected) one *= 2;
    }
    CHECK_EQUAL(array.read(), expected);
    for (const IssuedCall& call : calls) call.expect_success(mine.rank());
    mine.destroy(stream);
    if (mine.rank() == 1) ungated->close(false);
    if (mine.rank() == 0) mine.backend->close(false);
  });
}

}  // namespace

int main() {
  use_stand_ins();
  // With one channel a send holds up the receive that the other rank waits for, unlike kernels of a GPU; with late
  // completions a test that waits for each of them is slow.
  if (std::getenv("PROCGROUP_STAND_IN_CHANNELS") != nullptr || std::getenv("PROCGROUP_STAND_IN_BURST_US") != nullptr) {
    RUN_TEST(collectives_give_what_they_promise, 2, true, {});
    RUN_TEST(ranks_with_and_without_gates_understand_each_other);
    return 0;
  }
  for (const bool may_gate : {true, false}) {
    for (const int size : {2, 4}) {
      CASE("%d ranks, %s gates", size, may_gate ? "with" : "without");
      RUN_TEST(collectives_give_what_they_promise, size, may_gate, {});
      RUN_TEST(messages_give_what_they_promise, size, may_gate, {});
    }
    RUN_TEST(messages_and_collectives_have_the_order_of_their_streams, may_gate);
  }
  CASE("two hosts");
  RUN_TEST(collectives_give_what_they_promise, 2, true, {0, 1});
  RUN_TEST(messages_give_what_they_promise, 2, true, {0, 1});
  RUN_TEST(one_rank_alone);
  RUN_TEST(ranks_with_and_without_gates_understand_each_other);
}
