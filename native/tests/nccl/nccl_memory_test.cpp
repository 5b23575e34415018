// Memory that NCCL allocates, in a window of all ranks: it is freed when its group and its owners have gone, however a
// group ends.
#include "nccl/nccl_memory.hpp"

#include "tests/nccl/nccl_fixture.hpp"

extern "C" {  // of the stand-in
int stand_in_memories();
int stand_in_windowed_operations();
}

using namespace procgroup;

#ifdef __SANITIZE_THREAD__
// A communicator whose other rank has aborted is never freed: its thread waits inside of NCCL's end.
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0"; }
#endif

namespace {

constexpr size_t kCount = 16;

std::shared_ptr<NcclMemory> allocate(const NcclRank& mine) {
  return std::make_shared<NcclMemory>(mine.backend->library(), mine.gpu(), kCount * sizeof(int64_t));
}

// As PythonGroup::empty.
IssuedCall register_memory(const NcclRank& mine, std::shared_ptr<NcclMemory> memory, double seconds = kLong) {
  Request request;
  request.descriptor = {.op = OpKind::kEmpty, .external = true, .on_device = true, .count = memory->bytes()};
  request.task = std::make_shared<NcclRegistration>(mine.backend, std::vector{std::move(memory)});
  {
    const std::lock_guard issuing(mine.backend->issuing());
    mine.backend->add_ungated();
  }
  NoRuntime language;
  return {nullptr, mine.group.calls().start(std::move(request), seconds, &language)};
}

void await_memories(int count) {
  while (stand_in_memories() != count) std::this_thread::yield();
}

void calls_read_a_window_until_the_group_ends(int size, bool connects_first) {
  {
    NcclWorld world(size);
    const int before = stand_in_windowed_operations();
    world.in_all_ranks([&](NcclRank& mine) {
      const CudaStream stream = mine.make_stream();
      mine.backend->use(mine.rank());
      if (connects_first) connect(mine, stream);
      const std::shared_ptr<NcclMemory> memory = allocate(mine);
      register_memory(mine, memory).expect_success(mine.rank());
      const DeviceSpan span{memory->address(), kCount * sizeof(int64_t)};
      const NcclCall call{OpKind::kAllReduce, Dtype::kInt64, ReduceOp::kSum, 1, -1, {span}, {span}};
      for (int times = 0; times < 10; ++times) mine.issue(call, {stream}).expect_success(mine.rank());
      mine.synchronize(stream);
    });
    if (size > 1) CHECK_EQUAL(stand_in_windowed_operations() - before, 10 * size);
    CHECK_EQUAL(stand_in_memories(), size);
  }
  await_memories(0);
}

void a_rank_that_does_not_register_is_missed() {
  {
    NcclWorld world(2);
    world.in_all_ranks([&](NcclRank& mine) {
      const CudaStream stream = mine.make_stream();
      connect(mine, stream);
      if (mine.rank() == 1) return;
      const IssuedCall call = register_memory(mine, allocate(mine), 0.2);
      const Failure* failure = call.wait();
      check(failure != nullptr && failure->is<Timeout>(), "expected a timeout", 0);
      CHECK_EQUAL(failure->as<Timeout>()->missing, std::vector<int>{1});
    });
  }
  await_memories(0);
}

// The stand-in ends the process where memory is freed while a communicator has it in a window.
void an_abort_frees_the_memory(int delay_us) {
  {
    NcclWorld world(2);
    std::atomic<int> connected{0};
    world.in_all_ranks([&](NcclRank& mine) {
      const CudaStream stream = mine.make_stream();
      connect(mine, stream);
      for (++connected; connected < 2;) std::this_thread::yield();
      std::vector<IssuedCall> issued;
      try {
        for (int times = 0; times < 5; ++times) issued.push_back(register_memory(mine, allocate(mine)));
      } catch (const OperationFailed&) {
      }
      if (mine.rank() == 1) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      mine.group.abort();
      for (const IssuedCall& call : issued) call.wait();
      mine.synchronize(stream);
    });
  }
  await_memories(0);
}

}  // namespace

int main() {
  use_stand_ins();
  for (const int size : {1, 2, 3})
    for (const bool connects_first : {true, false})
      RUN_TEST(calls_read_a_window_until_the_group_ends, size, connects_first);
  RUN_TEST(a_rank_that_does_not_register_is_missed);
  for (int round = 0; round < 20; ++round) RUN_TEST(an_abort_frees_the_memory, round * 41);
}
