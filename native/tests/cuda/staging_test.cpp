// Arrays of a GPU whose call moves host memory: their values, and the memory, which later calls use again.
#include "cuda/staging.hpp"

#include "tests/function_task.hpp"
#include "tests/nccl/nccl_fixture.hpp"

using namespace procgroup;

namespace {

constexpr size_t kCount = 50;

// An all_reduce of two ranks whose arrays are staged.
struct Staged {
  std::shared_ptr<StagedTask> task;
  std::shared_ptr<GroupOperation> operation;
};

Staged start_sum(Group& group, Gpu& gpu, const DeviceArray& array, CudaStream stream,
                 std::shared_ptr<const void> owner = nullptr) {
  const auto task = std::make_shared<StagedTask>(gpu, std::vector{stream}, std::vector{array.span()},
                                                 std::vector{array.span()}, std::move(owner));
  Request request;
  request.descriptor.op = OpKind::kAllReduce;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = array.span().bytes / sizeof(int64_t);
  request.input = request.output = task->inputs()[0];
  CHECK(task->inputs()[0] == task->outputs()[0]);  // one place for what is read and written
  request.task = task;
  return {task, group.calls().start(std::move(request), kLong)};
}

void wait_for(const Staged& staged) {
  const auto end = [](GroupOperation& one) {
    while (!one.is_completed()) {
      one.help();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  };
  end(*staged.operation);
  if (staged.operation->device_work()) end(*staged.operation->device_work());
}

void calls_give_sums_and_use_memory_again() {
  std::vector<Rank> world = make_world(2);
  in_all_ranks(world, [&](Group& group) {
    Gpu& gpu = Gpu::get(group.rank());
    CudaStream stream = nullptr;
    {
      const OnGpu on_gpu(gpu);
      stream = gpu.make_stream();
    }
    DeviceArray one(gpu, stream, kCount), two(gpu, stream, kCount);
    std::vector<int64_t> expected(kCount);
    for (size_t index = 0; index < kCount; ++index) expected[index] = sum(2, index);
    size_t bytes = 0;
    for (int round = 0; round < 50; ++round) {
      one.write(values(group.rank(), kCount));
      two.write(values(group.rank(), kCount));
      {
        const Staged first = start_sum(group, gpu, one, stream), second = start_sum(group, gpu, two, stream);
        for (const Staged* staged : {&first, &second}) {
          wait_for(*staged);
          CHECK(staged->operation->failure() == nullptr);
          staged->task->let_wait({stream});
        }
      }
      CHECK_EQUAL(one.read(), expected);
      CHECK_EQUAL(two.read(), expected);
      if (round == 4) bytes = staged_bytes(gpu);
    }
    check(staged_bytes(gpu) <= 2 * bytes, "expected memory to be used again", group.rank());
  });
}

// Inputs and outputs of different sizes each have a place of their own.
void blocks_have_places_of_their_own_also_empty_ones() {
  Gpu& gpu = Gpu::get(0);
  CudaStream stream = nullptr;
  {
    const OnGpu on_gpu(gpu);
    stream = gpu.make_stream();
  }
  DeviceArray given(gpu, stream, kCount), taken(gpu, stream, kCount);
  given.write(values(0, kCount));
  const auto task = std::make_shared<StagedTask>(
      gpu, std::vector{stream}, std::vector{given.part(0, 10), given.part(10, 0), given.part(10, 40)},
      std::vector{taken.part(0, 0), taken.part(0, 30), taken.part(30, 20)}, nullptr);
  while (!task->ready()) std::this_thread::yield();
  std::vector<int64_t> read(kCount);
  std::memcpy(read.data(), task->inputs()[0], 10 * sizeof(int64_t));
  std::memcpy(read.data() + 10, task->inputs()[2], 40 * sizeof(int64_t));
  CHECK_EQUAL(read, values(0, kCount));
  const std::vector<int64_t> written = values(1, kCount);
  std::memcpy(task->outputs()[1], written.data(), 30 * sizeof(int64_t));
  std::memcpy(task->outputs()[2], written.data() + 30, 20 * sizeof(int64_t));
  std::vector<int> awaited;
  task->start(-1, 1);
  while (task->test(awaited) != Task::State::kCompleted) std::this_thread::yield();
  CHECK_EQUAL(taken.read(), written);
}

// The arrays are let go of, and hold what they held; the inner task, too.
void a_call_that_fails_writes_nothing() {
  std::vector<Rank> world = make_world(2);
  std::weak_ptr<int> owned;
  {
    const auto owner = std::make_shared<int>(1);
    owned = owner;
    in_all_ranks(world, [&](Group& group) {
      Gpu& gpu = Gpu::get(group.rank());
      CudaStream stream = nullptr;
      {
        const OnGpu on_gpu(gpu);
        stream = gpu.make_stream();
      }
      DeviceArray array(gpu, stream, kCount + static_cast<size_t>(group.rank()));
      const std::vector<int64_t> before = values(0, kCount + static_cast<size_t>(group.rank()));
      array.write(before);
      const Staged staged = start_sum(group, gpu, array, stream, owner);
      wait_for(staged);
      CHECK(staged.operation->failure() != nullptr);
      CHECK_EQUAL(array.read(), before);
    });
  }
  world.clear();
  while (!owned.expired()) {  // swept when another call takes memory
    DeviceArray array(Gpu::get(0), legacy_stream(), 1);
    for (const int gpu : {0, 1}) StagedTask(Gpu::get(gpu), {}, {}, {}, nullptr);
  }
}

}  // namespace

int main() {
  use_stand_ins();
  RUN_TEST(blocks_have_places_of_their_own_also_empty_ones);
  RUN_TEST(calls_give_sums_and_use_memory_again);
  RUN_TEST(a_call_that_fails_writes_nothing);
}
