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

// Each call in turn, on streams of its own and again on the program's: `stays`.
void every_collective(NcclRank& mine, bool stays) {
  const int size = mine.size(), rank = mine.rank();
  const CudaStream stream = mine.make_stream();
  const auto ranks = static_cast<size_t>(size);
  const auto made = [&](OpKind op, int root, std::vector<DeviceSpan> inputs, std::vector<DeviceSpan> outputs) {
    const IssuedCall issued = mine.issue(
        {op, Dtype::kInt64, ReduceOp::kSum, 1, root, std::move(inputs), std::move(outputs)}, {stream}, stays);
    if (!stays || !issued.task->may_have_written()) issued.expect_success(rank);  // without a gate the host waits
    if (!stays) issued.task->let_wait({stream});
    return issued;
  };
  const auto blocks_from_all = [&](auto from) {
    std::vector<std::vector<int64_t>> blocks;
    for (int other = 0; other < size; ++other) blocks.push_back(from(other));
    return blocks;
  };
  std::vector<int64_t> sums(kCount);
  for (size_t index = 0; index < kCount; ++index) sums[index] = sum(size, index);
  const int root = size - 1;
  {
    CASE("all_reduce");
    DeviceArray array(mine.gpu(), stream, kCount);
    array.write(values(rank, kCount));
    const IssuedCall call = made(OpKind::kAllReduce, -1, {array.span()}, {array.span()});
    CHECK_EQUAL(array.read(), sums);
    call.expect_success(rank);
  }
  {
    CASE("all_reduce of two arrays");
    DeviceArray one(mine.gpu(), stream, kCount), two(mine.gpu(), stream, kCount);
    one.write(values(rank, kCount));
    two.write(values(rank, kCount));
    const IssuedCall call = made(OpKind::kAllReduce, -1, {one.span(), two.span()}, {one.span(), two.span()});
    CHECK_EQUAL(one.read(), sums);
    CHECK_EQUAL(two.read(), sums);
    call.expect_success(rank);
  }
  {
    CASE("reduce");
    DeviceArray array(mine.gpu(), stream, kCount);
    array.write(values(rank, kCount));
    const IssuedCall call = made(OpKind::kReduce, root, {array.span()}, {array.span()});
    const std::vector<int64_t> got = array.read();
    if (rank == root) CHECK_EQUAL(got, sums);
    call.expect_success(rank);
  }
  {
    CASE("broadcast");
    DeviceArray array(mine.gpu(), stream, kCount);
    array.write(values(rank, kCount));
    std::vector<DeviceSpan> given, taken;
    (rank == root ? given : taken).push_back(array.span());
    const IssuedCall call = made(OpKind::kBroadcast, root, given, taken);
    CHECK_EQUAL(array.read(), values(root, kCount));
    call.expect_success(rank);
  }
  for (const bool are_apart : {false, true}) {
    CASE("all_gather%s", are_apart ? " into blocks that are apart" : "");
    DeviceArray given(mine.gpu(), stream, kCount), taken(mine.gpu(), stream, kCount * ranks);
    given.write(values(rank, kCount));
    const IssuedCall call = made(OpKind::kAllGather, -1, {given.span()}, blocks_of(taken, size, are_apart));
    CHECK_EQUAL(taken.read(), joined(blocks_from_all([](int other) { return values(other, kCount); }), are_apart));
    call.expect_success(rank);
  }
  for (const bool are_apart : {false, true}) {
    CASE("reduce_scatter%s", are_apart ? " of blocks that are apart" : "");
    DeviceArray given(mine.gpu(), stream, kCount * ranks), taken(mine.gpu(), stream, kCount);
    given.write(joined(blocks_from_all([&](int place) { return block_of(rank, place); }), are_apart));
    const IssuedCall call = made(OpKind::kReduceScatter, -1, blocks_of(given, size, are_apart), {taken.span()});
    std::vector<int64_t> expected = sums;
    for (int64_t& one : expected) one += int64_t{10'000} * rank * size;
    CHECK_EQUAL(taken.read(), expected);
    call.expect_success(rank);
  }
  {
    CASE("gather");
    DeviceArray given(mine.gpu(), stream, kCount), taken(mine.gpu(), stream, kCount * ranks);
    given.write(values(rank, kCount));
    const auto outputs = rank == root ? blocks_of(taken, size, false) : std::vector<DeviceSpan>{};
    const IssuedCall call = made(OpKind::kGather, root, {given.span()}, outputs);
    const std::vector<int64_t> got = taken.read();
    if (rank == root) CHECK_EQUAL(got, joined(blocks_from_all([](int other) { return values(other, kCount); })));
    call.expect_success(rank);
  }
  {
    CASE("scatter");
    DeviceArray given(mine.gpu(), stream, kCount * ranks), taken(mine.gpu(), stream, kCount);
    given.write(joined(blocks_from_all([&](int place) { return block_of(rank, place); })));
    const auto inputs = rank == root ? blocks_of(given, size, false) : std::vector<DeviceSpan>{};
    const IssuedCall call = made(OpKind::kScatter, root, inputs, {taken.span()});
    CHECK_EQUAL(taken.read(), block_of(root, rank));
    call.expect_success(rank);
  }
  {
    CASE("all_to_all");
    DeviceArray given(mine.gpu(), stream, kCount * ranks), taken(mine.gpu(), stream, kCount * ranks);
    given.write(joined(blocks_from_all([&](int place) { return block_of(rank, place); })));
    const IssuedCall call = made(OpKind::kAllToAll, -1, blocks_of(given, size, false), blocks_of(taken, size, false));
    CHECK_EQUAL(taken.read(), joined(blocks_from_all([&](int other) { return block_of(other, rank); })));
    call.expect_success(rank);
  }
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
