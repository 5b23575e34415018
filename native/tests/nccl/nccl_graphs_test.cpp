// Calls that are captured into a CUDA graph: they run at each launch, and a launch that cannot end ends the group.
//
// The ranks are threads of one process, where a capture forbids all threads to ask for the end of work: they capture at
// the same time, and use their GPUs before and after it.
#include <barrier>

#include "tests/nccl/nccl_fixture.hpp"

extern "C" {
int cuStreamBeginCapture(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);
int cuGraphInstantiate(void** made, void* graph, uint64_t flags);
int cuGraphLaunch(void* made, void* stream);
int cuGraphDestroy(void* graph);
int cuGraphExecDestroy(void* made);
}

using namespace procgroup;

namespace {

constexpr size_t kCount = 4;
constexpr int kCalls = 3;
constexpr int kLaunches = 10;

// As PythonGroup::capture.
void capture_call(NcclRank& mine, const DeviceArray& array, CudaStream stream, bool stays, double seconds) {
  const auto task = mine.task_for(mine.all_reduce(array), {stream}, stays);
  check(task->is_captured(), "expected a capture", mine.rank());
  Request request;
  request.descriptor = {.op = OpKind::kAllReduce, .dtype = Dtype::kInt64, .count = kCount};
  request.descriptor.external = request.descriptor.on_device = request.descriptor.captured = true;
  request.task = task;
  task->queue_later();
  NoRuntime language;
  const IssuedCall issued{task, mine.group.calls().start(std::move(request), seconds, &language)};
  issued.expect_success(mine.rank());
  task->capture();
  task->let_wait({stream});
  mine.group.devices().watch_replays(issued.operation->call(), task, seconds);
}

// A graph of a rank, which reduces an array several times.
class ReducingGraph {
 public:
  ReducingGraph(NcclRank& mine, std::barrier<>& all, double seconds)
      : mine_(mine), stream_(mine.make_stream()), array(mine.gpu(), stream_, kCount) {
    connect(mine, stream_);
    array.write(std::vector<int64_t>(kCount, 1));
    mine.synchronize(stream_);
    void* graph = nullptr;
    all.arrive_and_wait();
    {
      const OnGpu on_gpu(mine.gpu());
      require(cuStreamBeginCapture(stream_, 0), "cuStreamBeginCapture");
      for (int call = 0; call < kCalls; ++call) capture_call(mine, array, stream_, call != 1, seconds);
      require(cuStreamEndCapture(stream_, &graph), "cuStreamEndCapture");
      require(cuGraphInstantiate(&made_, graph, 0), "cuGraphInstantiate");
      require(cuGraphDestroy(graph), "cuGraphDestroy");
    }
    all.arrive_and_wait();
  }
  ReducingGraph(const ReducingGraph&) = delete;
  ~ReducingGraph() {
    cuGraphExecDestroy(made_);
    mine_.destroy(stream_);
  }

  void launch() {
    const OnGpu on_gpu(mine_.gpu());
    require(cuGraphLaunch(made_, stream_), "cuGraphLaunch");
  }

 private:
  NcclRank& mine_;
  CudaStream stream_;
  void* made_ = nullptr;

 public:
  DeviceArray array;
};

void captured_calls_run_at_each_launch(int size) {
  NcclWorld world(size);
  std::barrier<> all(size);
  world.in_all_ranks([&](NcclRank& mine) {
    ReducingGraph graph(mine, all, kLong);
    CHECK_EQUAL(graph.array.read(), std::vector<int64_t>(kCount, 1));
    int64_t expected = 1;
    for (int launch = 0; launch < kLaunches; ++launch) {
      graph.launch();
      for (int call = 0; call < kCalls; ++call) expected *= size;
    }
    CHECK_EQUAL(graph.array.read(), std::vector<int64_t>(kCount, expected));
  });
}

OperationFailed failure_of_call(const std::function<void()>& call, int rank) {
  try {
    call();
  } catch (const OperationFailed& failed) {
    return failed;
  }
  check(false, "expected an error", rank);
  return {Broken{}, {}};
}

// The graph of one rank is launched, and those of the others are not: the group ends, the stream runs on, and the error
// names the others.
void a_launch_that_the_others_do_not_make_ends_the_group() {
  std::weak_ptr<const NcclLibrary> library;
  {
    NcclWorld world(2);
    std::barrier<> all(2);
    world.in_all_ranks([&](NcclRank& mine) {
      ReducingGraph graph(mine, all, 0.3);
      if (mine.rank() == 0) {
        graph.launch();
        while (!mine.group.end().is_completed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        graph.array.read();
      }
      all.arrive_and_wait();
      Request barrier;  // by which the other rank learns that the group has ended
      NoRuntime language;
      const auto [failure, call] =
          failure_of_call([&] { mine.group.calls().run(barrier, kLong, language); }, mine.rank());
      const std::vector<int> missing{1};
      if (mine.rank() == 0) CHECK(failure.is<Timeout>() && call.captured);
      CHECK(failure.missing() == missing);
      CHECK(failure.reason().ends_with("a replay of this call in a CUDA graph, which does not run on rank 1"));
    });
    library = world.library();
  }
  while (!library.expired()) std::this_thread::yield();  // the communicators end with the graphs
}

}  // namespace

int main() {
  use_stand_ins();
  captured_calls_run_at_each_launch(1);
  for (const int size : {2, 4}) {
    CASE("%d ranks", size);
    captured_calls_run_at_each_launch(size);
  }
  RUN_TEST(a_launch_that_the_others_do_not_make_ends_the_group);
}
