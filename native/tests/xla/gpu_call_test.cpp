// Calls of compiled functions on buffers on a GPU, with the stand-ins of NCCL and of CUDA's driver: a fake call frame
// gives XLA's stream. CMake runs the same program with stand-ins that do what GPUs may do.
#include <array>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/nccl/nccl_fixture.hpp"
#include "tests/xla/fake_buffers.hpp"
#include "xla/compiled_call.hpp"

extern "C" {
int cuStreamBeginCapture(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);
int cuGraphDestroy(void* graph);
}

using namespace procgroup;

namespace {

// Arrays of 64 bits on a GPU, as arguments or results of a call. As with XLA's, their memory is free when its stream
// has come to their end, whatever other streams do.
class DeviceBuffers {
 public:
  DeviceBuffers(Gpu& gpu, CudaStream stream) : gpu_(gpu), stream_(stream) {}
  DeviceBuffers(const DeviceBuffers&) = delete;
  ~DeviceBuffers() {
    const OnGpu on_gpu(gpu_);
    require(cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

  void add(const std::vector<int64_t>& elements, Dtype dtype = Dtype::kInt64) {
    const xla::DataType type = xla::type_of(dtype == Dtype::kInt64 ? Dtype::kInt64 : Dtype::kUint64);
    counts_.push_back(elements.size());
    arrays_.emplace_back(gpu_, stream_, std::max(elements.size(), size_t{1}));
    if (!elements.empty()) arrays_.back().write(elements);
    void* const data = elements.empty() ? nullptr : reinterpret_cast<void*>(arrays_.back().span().address);
    buffers_.add(type, data, {static_cast<int64_t>(elements.size())});
  }
  FlatArrays all() { return buffers_.arrays(); }
  std::vector<int64_t> read(size_t index) const {
    std::vector<int64_t> values = arrays_[index].read();
    values.resize(counts_[index]);
    return values;
  }

 private:
  Gpu& gpu_;
  CudaStream stream_;
  std::vector<DeviceArray> arrays_;
  std::vector<size_t> counts_;
  FakeBuffers buffers_;
};

// A rank that makes calls on a stream, as XLA does.
class XlaRank {
 public:
  explicit XlaRank(NcclRank& rank) : mine_(rank), stream_(rank.make_stream()), gpu_(stream_, rank.backend) {}
  XlaRank(NcclRank& rank, std::shared_ptr<NcclBackend> backend)
      : mine_(rank), stream_(rank.make_stream()), gpu_(stream_, std::move(backend)) {}
  XlaRank(const XlaRank&) = delete;
  ~XlaRank() {
    mine_.synchronize(stream_);
    mine_.destroy(stream_);
  }

  CudaStream stream() const { return stream_; }
  DeviceBuffers buffers() const { return {mine_.gpu(), stream_}; }
  void run(const CompiledCall& call, DeviceBuffers& given, DeviceBuffers& results, double seconds = kLong) {
    NoRuntime language;
    call.run(mine_.group, given.all(), results.all(), seconds, language, &gpu_);
  }
  // An all_reduce of one array.
  std::vector<int64_t> all_reduce(const std::vector<int64_t>& elements, double seconds = kLong) {
    DeviceBuffers given = buffers(), results = buffers();
    given.add(elements);
    results.add(std::vector<int64_t>(elements.size(), -1));
    run(CompiledCall({.op = OpKind::kAllReduce}, {Dtype::kInt64}), given, results, seconds);
    return results.read(0);
  }

 private:
  NcclRank& mine_;
  const CudaStream stream_;
  const XlaGpu gpu_;
};

// Two arrays of a dtype, around one of another dtype.
constexpr std::array<Dtype, 3> kDtypesOfCall{Dtype::kInt64, Dtype::kUint64, Dtype::kInt64};

void make_each_call(XlaRank& xla_rank, int rank, int size, size_t first, size_t second, ReduceOp reduce_op) {
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast, OpKind::kAllGather,
                          OpKind::kReduceScatter, OpKind::kAllToAll, OpKind::kSend}) {
    CASE("%s of %zu and %zu", op_name(op), first, second);
    const bool is_message = op == OpKind::kSend;
    const CompiledCall call({.op = op,
                             .root = is_message ? (rank + 1) % size : kRoot,
                             .source = is_message ? (rank + size - 1) % size : -1,
                             .reduce_op = reduce_op,
                             .tag = 5},
                            {kDtypesOfCall.begin(), kDtypesOfCall.end()});
    const auto ranks = static_cast<size_t>(size);
    const std::array<size_t, 3> counts{first, 3, second};
    DeviceBuffers given = xla_rank.buffers(), results = xla_rank.buffers();
    for (size_t which = 0; which < counts.size(); ++which) {
      given.add(elements<int64_t>(rank, (has_input_blocks(op) ? ranks : 1) * counts[which]), kDtypesOfCall[which]);
      results.add(std::vector<int64_t>((has_output_blocks(op) ? ranks : 1) * counts[which], -1), kDtypesOfCall[which]);
    }
    xla_rank.run(call, given, results);
    for (size_t which = 0; which < counts.size(); ++which) {
      CHECK_EQUAL(results.read(which), expected<int64_t>(op, rank, size, counts[which], reduce_op));
      CHECK_EQUAL(given.read(which), elements<int64_t>(rank, (has_input_blocks(op) ? ranks : 1) * counts[which]));
    }
  }
  DeviceBuffers none = xla_rank.buffers();
  xla_rank.run(CompiledCall({.op = OpKind::kBarrier}, {}), none, none);
}

void each_call_by_nccl(int size, bool may_gate) {
  NcclWorld world(size, may_gate);
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine);
    make_each_call(xla_rank, mine.rank(), size, 5, 0, ReduceOp::kSum);
    make_each_call(xla_rank, mine.rank(), size, 0, 0, ReduceOp::kSum);
    make_each_call(xla_rank, mine.rank(), size, 3000, 17, ReduceOp::kSum);
    const std::lock_guard issuing(mine.backend->issuing());
    CHECK(mine.backend->has_gate() == (may_gate && mine.gpu().has_words()));
  });
}

// In a group with NCCL, which has no OR, and in one without it.
void each_call_through_host_memory(int size, bool has_nccl) {
  NcclWorld world(size);
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine, has_nccl ? mine.backend : nullptr);
    make_each_call(xla_rank, mine.rank(), size, 5, 0, ReduceOp::kBor);
    make_each_call(xla_rank, mine.rank(), size, 3000, 17, ReduceOp::kBor);
  });
}

// Rank 0 has the arrays of the call in host memory, as on a CPU.
void ranks_on_gpus_and_on_cpus_meet_in_host_memory() {
  NcclWorld world(3);
  world.in_all_ranks([&](NcclRank& mine) {
    const CompiledCall call({.op = OpKind::kAllReduce}, {Dtype::kInt64, Dtype::kInt64});
    const std::vector<int64_t> sums = expected<int64_t>(OpKind::kAllReduce, mine.rank(), 3, 7);
    if (mine.rank() != 0) {
      XlaRank xla_rank(mine, nullptr);
      DeviceBuffers given = xla_rank.buffers(), results = xla_rank.buffers();
      for (int which = 0; which < 2; ++which)
        given.add(elements<int64_t>(mine.rank(), 7)), results.add(elements<int64_t>(0, 7));
      xla_rank.run(call, given, results);
      for (const size_t which : {0, 1}) CHECK_EQUAL(results.read(which), sums);
      return;
    }
    std::vector<int64_t> one = elements<int64_t>(0, 7), two = one, first(7), second(7);
    FakeBuffers given, results;
    for (auto* array : {&one, &two}) given.add(xla::type_of(Dtype::kInt64), *array, {7});
    for (auto* array : {&first, &second}) results.add(xla::type_of(Dtype::kInt64), *array, {7});
    NoRuntime language;
    call.run(mine.group, given.arrays(), results.arrays(), kLong, language);
    CHECK_EQUAL(first, sums);
    CHECK_EQUAL(second, sums);
  });
}

// The thread comes back before the other rank makes the call, and finds the GPU that it had chosen.
void a_call_behind_its_gate_does_not_wait() {
  NcclWorld world(2);
  std::atomic<bool> has_returned{false};
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine);
    CHECK_EQUAL(xla_rank.all_reduce({1}), std::vector<int64_t>{2});
    if (!mine.gpu().has_words()) return;
    const OnGpu elsewhere(Gpu::get(3));
    CudaContext chosen = nullptr, found = nullptr;
    require(CudaDriver::get().cuCtxGetCurrent(&chosen), "cuCtxGetCurrent");
    DeviceBuffers given = xla_rank.buffers(), results = xla_rank.buffers();
    for (const int64_t one : {10, 20}) given.add({one + mine.rank()}), results.add({-1});
    while (mine.rank() == 1 && !has_returned) std::this_thread::yield();
    xla_rank.run(CompiledCall({.op = OpKind::kAllReduce}, {Dtype::kInt64, Dtype::kInt64}), given, results);
    has_returned = true;
    require(CudaDriver::get().cuCtxGetCurrent(&found), "cuCtxGetCurrent");
    CHECK(found == chosen);
    CHECK_EQUAL(results.read(0), std::vector<int64_t>{21});
    CHECK_EQUAL(results.read(1), std::vector<int64_t>{41});
  });
}

template <class Call>
std::optional<Failure> failure_of_call(Call call) {
  try {
    call();
  } catch (const OperationFailed& failed) {
    return failed.failure;
  }
  return std::nullopt;
}

// The first call has no gate: it raises its error itself, and no array has changed. A later one has returned by then:
// the next call raises the error.
void ranks_that_do_not_agree(bool is_first) {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine);
    if (!is_first) CHECK_EQUAL(xla_rank.all_reduce({1}), std::vector<int64_t>{2});
    DeviceBuffers given = xla_rank.buffers(), results = xla_rank.buffers();
    const size_t count = 5 + static_cast<size_t>(mine.rank());
    given.add(elements<int64_t>(mine.rank(), count));
    results.add(std::vector<int64_t>(count, -1));
    const CompiledCall call({.op = OpKind::kAllReduce}, {Dtype::kInt64});
    std::optional<Failure> failure = failure_of_call([&] { xla_rank.run(call, given, results); });
    if (is_first || !mine.gpu().has_words()) {
      CHECK_EQUAL(results.read(0), std::vector<int64_t>(count, -1));
    } else {
      results.read(0);  // the stream runs on
      failure = failure_of_call([&] {
        for (;;) xla_rank.run(call, given, results);
      });
    }
    CHECK(failure);
    const std::string text = failure->summary();
    check(text.find("rank 0 called all_reduce(SUM) of 5 int64") != std::string::npos, text.c_str(), mine.rank());
  });
}

void a_rank_that_never_comes() {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    if (mine.rank() == 1) return;
    XlaRank xla_rank(mine);
    const std::optional<Failure> failure = failure_of_call([&] { xla_rank.all_reduce({1}, 0.2); });
    CHECK(failure && failure->is<Timeout>());
    CHECK_EQUAL(failure->as<Timeout>()->missing, std::vector<int>{1});
  });
}

void a_rank_that_ends_the_group() {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    if (mine.rank() == 1) return mine.group.abort();
    XlaRank xla_rank(mine);
    const std::optional<Failure> failure = failure_of_call([&] { xla_rank.all_reduce({1}); });
    CHECK(failure);
  });
}

// XLA's memory ends with the failure, while the message to the other rank is on its way.
void a_message_outlives_a_failed_exchange() {
  NcclWorld world(2);
  std::atomic<bool> has_failed{false};
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine);
    if (mine.rank() == 0) {
      DeviceBuffers given = xla_rank.buffers(), results = xla_rank.buffers();
      given.add(elements<int64_t>(0, 1000));
      results.add(std::vector<int64_t>(1000, -1));
      const CompiledCall call({.op = OpKind::kSend, .root = 1, .source = 1, .tag = 5}, {Dtype::kInt64});
      const std::optional<Failure> failure = failure_of_call([&] { xla_rank.run(call, given, results, 0.2); });
      CHECK(failure && failure->is<Timeout>());
      has_failed = true;
    }
    while (!has_failed) std::this_thread::yield();
  });
}

void another_gpu_is_refused() {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    XlaRank xla_rank(mine);
    CHECK_EQUAL(xla_rank.all_reduce({1}), std::vector<int64_t>{2});
    Gpu& other = Gpu::get(2);
    const OnGpu on_other(other);
    const CudaStream stream = other.make_stream();
    std::string refusal;
    {
      DeviceBuffers given(other, stream), results(other, stream);
      given.add({1});
      results.add({1});
      NoRuntime language;
      const XlaGpu gpu(stream, mine.backend);
      try {
        CompiledCall({.op = OpKind::kAllReduce}, {Dtype::kInt64})
            .run(mine.group, given.all(), results.all(), kLong, language, &gpu);
      } catch (const std::invalid_argument& error) {
        refusal = error.what();
      }
    }
    CHECK_EQUAL(refusal, "all_reduce: the arrays are on GPU 2, but this group uses GPU " + std::to_string(mine.rank()) +
                             " on this rank, as device_id says. Move them there.");
    other.destroy_stream(stream);
    CHECK_EQUAL(xla_rank.all_reduce({2}), std::vector<int64_t>{4});  // nothing was sent
  });
}

void a_capture_is_refused() {
  Gpu& gpu = Gpu::get(0);
  const OnGpu on_gpu(gpu);
  const CudaStream stream = gpu.make_stream();
  require(cuStreamBeginCapture(stream, 2), "cuStreamBeginCapture");
  std::string refusal;
  try {
    const XlaGpu captured(stream, nullptr);
  } catch (const std::runtime_error& error) {
    refusal = error.what();
  }
  CHECK_EQUAL(refusal, "XLA captures this call into a CUDA graph, in which the ranks could not compare it");
  void* graph = nullptr;
  require(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
  require(cuGraphDestroy(graph), "cuGraphDestroy");
  gpu.destroy_stream(stream);
}

// The frame's context is the answer of this XLA: a stream, or an error.
struct Answer {
  CudaStream stream;
  xla::Error* error;
};
std::string text_of_error;

void streams_of_frames() {
  xla::Api api{sizeof(xla::Api), nullptr, {sizeof(xla::Version), nullptr, 0, 3}, nullptr, nullptr};
  api.create_error = [](xla::ErrorArguments* arguments) {
    text_of_error = arguments->message;
    return reinterpret_cast<xla::Error*>(&text_of_error);
  };
  api.get_stream = [](xla::StreamArguments* arguments) {
    const auto& answer = *reinterpret_cast<const Answer*>(arguments->context);
    arguments->stream = answer.stream;
    return answer.error;
  };
  int place = 0;
  Answer answer{&place, nullptr};
  xla::CallFrame frame{};
  frame.api = &api;
  frame.context = reinterpret_cast<xla::Context*>(&answer);
  CudaStream stream = nullptr;
  CHECK(read_stream(frame, stream) == nullptr);
  CHECK(stream == &place);

  answer.stream = stream = nullptr;
  CHECK(read_stream(frame, stream) != nullptr);
  CHECK_EQUAL(text_of_error, "XLA gives no stream for a call on a GPU");
  answer = {&place, reinterpret_cast<xla::Error*>(&place)};
  CHECK(read_stream(frame, stream) == answer.error);  // XLA's own
  api.struct_size = offsetof(xla::Api, get_stream);
  CHECK(read_stream(frame, stream) != nullptr);
  CHECK_EQUAL(text_of_error, "this XLA does not give the stream of a call, which procgroup needs on a GPU");
  CHECK(stream == nullptr);
}

}  // namespace

int main() {
  use_stand_ins();
  // See nccl_values_test.
  const bool is_slow =
      std::getenv("PROCGROUP_STAND_IN_CHANNELS") != nullptr || std::getenv("PROCGROUP_STAND_IN_BURST_US") != nullptr;
  if (is_slow) {
    RUN_TEST(a_call_behind_its_gate_does_not_wait);
    return 0;
  }
  for (const bool may_gate : {true, false})
    for (const int size : {2, 3}) RUN_TEST(each_call_by_nccl, size, may_gate);
  for (const bool has_nccl : {true, false}) RUN_TEST(each_call_through_host_memory, 3, has_nccl);
  RUN_TEST(ranks_on_gpus_and_on_cpus_meet_in_host_memory);
  RUN_TEST(a_call_behind_its_gate_does_not_wait);
  for (const bool is_first : {true, false}) RUN_TEST(ranks_that_do_not_agree, is_first);
  RUN_TEST(a_rank_that_never_comes);
  RUN_TEST(a_rank_that_ends_the_group);
  RUN_TEST(a_message_outlives_a_failed_exchange);
  RUN_TEST(another_gpu_is_refused);
  RUN_TEST(a_capture_is_refused);
  RUN_TEST(streams_of_frames);
  return 0;
}
