// Many calls at once, none of which is awaited: the host is ahead of the GPUs, and of the other ranks.
#include "tests/nccl/nccl_fixture.hpp"

using namespace procgroup;

namespace {

constexpr size_t kCount = 4;

// An array of a rank, with a stream of its own.
struct Counter {
  Counter(NcclRank& rank) : mine(rank), stream(rank.make_stream()), array(rank.gpu(), stream, kCount) {
    array.write(std::vector<int64_t>(kCount, 0));
  }
  ~Counter() { mine.destroy(stream); }

  NcclRank& mine;
  CudaStream stream;
  DeviceArray array;
};

// A maximum of what the ranks write between the calls: the stream's order is that of the calls on all ranks.
void calls_without_a_wait(int size, int streams, int calls) {
  NcclWorld world(size);
  world.in_all_ranks([&](NcclRank& mine) {
    std::vector<std::unique_ptr<Counter>> counters;
    for (int index = 0; index < streams; ++index) counters.push_back(std::make_unique<Counter>(mine));
    connect(mine, counters[0]->stream);
    std::vector<IssuedCall> issued;
    for (int call = 0; call < calls; ++call) {
      Counter& counter = *counters[static_cast<size_t>(call % streams)];
      if (call % 50 < streams) counter.array.write(values(mine.rank(), kCount));
      issued.push_back(mine.issue(
          {OpKind::kAllReduce, Dtype::kInt64, ReduceOp::kMax, 1, -1, {counter.array.span()}, {counter.array.span()}},
          {counter.stream}));
    }
    for (const auto& counter : counters) CHECK_EQUAL(counter->array.read(), values(size - 1, kCount));
    for (const IssuedCall& call : issued) call.expect_success(mine.rank());
  });
}

// Two threads of each rank call at once. The ranks match calls by their order, so all calls are equal.
void two_threads_call_at_once(int size) {
  constexpr int kCalls = 200;
  NcclWorld world(size);
  world.in_all_ranks([&](NcclRank& mine) {
    {
      Counter counter(mine);
      connect(mine, counter.stream);
    }
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread)
      threads.emplace_back([&, thread] {
        CASE("rank %d, thread %d", mine.rank(), thread);
        Counter counter(mine);
        counter.array.write(values(0, kCount));
        std::vector<IssuedCall> issued;
        for (int call = 0; call < kCalls; ++call)
          issued.push_back(mine.issue({OpKind::kAllReduce,
                                       Dtype::kInt64,
                                       ReduceOp::kMax,
                                       1,
                                       -1,
                                       {counter.array.span()},
                                       {counter.array.span()}},
                                      {counter.stream}, thread == 0));
        for (const IssuedCall& call : issued) call.expect_success(mine.rank());
        CHECK_EQUAL(counter.array.read(), values(0, kCount));
      });
    for (std::thread& thread : threads) thread.join();
  });
}

// Calls that take no gate between others that do: NCCL gets them in the order of the calls.
void calls_with_and_without_gates_alternate() {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    Counter counter(mine);
    connect(mine, counter.stream);
    DeviceArray all(mine.gpu(), counter.stream, 2 * kCount);
    counter.array.write(values(mine.rank(), kCount));
    std::vector<IssuedCall> issued;
    for (int call = 0; call < 60; ++call) {
      if (call % 3 == 2)  // into blocks that are apart
        issued.push_back(mine.issue({OpKind::kAllGather,
                                     Dtype::kInt64,
                                     ReduceOp::kSum,
                                     1,
                                     -1,
                                     {counter.array.span()},
                                     {all.part(kCount, kCount), all.part(0, kCount)}},
                                    {counter.stream}));
      else
        issued.push_back(mine.issue(
            {OpKind::kAllReduce, Dtype::kInt64, ReduceOp::kMax, 1, -1, {counter.array.span()}, {counter.array.span()}},
            {counter.stream}));
      // What has no gate is awaited before its stream is used again.
      if (!issued.back().task->may_have_written()) issued.back().expect_success(mine.rank());
    }
    std::vector<int64_t> expected = values(1, kCount);
    CHECK_EQUAL(counter.array.read(), expected);
    expected.insert(expected.end(), expected.begin(), expected.begin() + kCount);
    CHECK_EQUAL(all.read(), expected);
    for (const IssuedCall& call : issued) call.expect_success(mine.rank());
  });
}

}  // namespace

int main() {
  use_stand_ins();
  RUN_TEST(calls_without_a_wait, 2, 1, 2000);
  RUN_TEST(calls_without_a_wait, 2, 2, 2000);
  RUN_TEST(calls_without_a_wait, 4, 2, 300);
  RUN_TEST(two_threads_call_at_once, 2);
  RUN_TEST(two_threads_call_at_once, 4);
  RUN_TEST(calls_with_and_without_gates_alternate);
}
