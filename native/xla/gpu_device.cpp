#include "xla/gpu_device.hpp"

#include <chrono>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "group/group_operation.hpp"

namespace procgroup {
namespace {

constexpr auto kPause = std::chrono::microseconds(50);
constexpr int kLooksBetweenSignals = 100;

CudaAddress address_of(const void* data) { return reinterpret_cast<CudaAddress>(data); }

std::vector<DeviceSpan> spans_of(const std::vector<Block>& blocks, Dtype dtype) {
  std::vector<DeviceSpan> spans;
  for (const Block& block : blocks) spans.push_back({address_of(block.data), block.count * dtype_size(dtype)});
  return spans;
}

std::vector<DeviceSpan> spans_of(const FlatArrays& arrays) {
  std::vector<DeviceSpan> spans;
  for (const FlatArray& array : arrays)
    spans.push_back({address_of(array.data), array.count * dtype_size(array.dtype)});
  return spans;
}

FlatArrays moved_to(const std::vector<void*>& places, FlatArrays arrays) {
  for (size_t index = 0; index < arrays.size(); ++index) arrays[index].data = places[index];
  return arrays;
}

}  // namespace

XlaGpu::XlaGpu(CudaStream its_stream, std::shared_ptr<NcclBackend> backend)
    : gpu(Gpu::get(gpu_of_stream(its_stream))), stream(its_stream), nccl(std::move(backend)) {
  const OnGpu on_gpu(gpu);
  if (gpu.is_capturing(stream))
    throw std::runtime_error("XLA captures this call into a CUDA graph, in which the ranks could not compare it");
}

GpuDevice::GpuDevice(Group& group, double seconds, LanguageRuntime& language, const XlaGpu& gpu, OpKind op)
    : CallDevice(group, seconds, language), nccl_(gpu.nccl), gpu_(gpu.gpu), stream_(gpu.stream), on_gpu_(gpu.gpu) {
  if (!nccl_->use(gpu_.number())) throw std::invalid_argument(nccl_->refusal_of(op, gpu_.number()));
  if (is_message(op)) return;
  issuing_ = std::unique_lock(nccl_->issuing());
  has_gate_ = nccl_->has_gate();
}

std::shared_ptr<std::byte[]> GpuDevice::allocate(size_t bytes) {
  const auto free = [&gpu = gpu_, stream = stream_](std::byte* memory) {
    try {
      const OnGpu on_gpu(gpu);
      gpu.free(stream, address_of(memory));
    } catch (const std::runtime_error&) {  // of the GPU: then nothing is used again
    }
  };
  const std::shared_ptr<std::byte[]> memory(reinterpret_cast<std::byte*>(gpu_.allocate(stream_, bytes)), free);
  allocated_.push_back(memory);
  return memory;
}

void GpuDevice::copy(void* to, const void* from, size_t bytes) const {
  if (bytes != 0) gpu_.copy(stream_, address_of(to), address_of(from), bytes);
}

void GpuDevice::clear(void* at, size_t bytes) const {
  if (bytes != 0) gpu_.clear(stream_, address_of(at), bytes);
}

// As PythonGroup::issue_to_nccl.
void GpuDevice::run(Request request) {
  Descriptor& call = request.descriptor;
  const std::vector<Block> input{{const_cast<void*>(request.input), call.count}}, output{{request.output, call.count}};
  const auto task = task_for({.op = call.op,
                              .dtype = call.dtype,
                              .reduce_op = reduces(call.op) ? call.reduce_op : ReduceOp::kSum,
                              .factor = request.factor,
                              .root = call.root,
                              .inputs = spans_of(has_input_blocks(call.op) ? request.inputs : input, call.dtype),
                              .outputs = spans_of(has_output_blocks(call.op) ? request.outputs : output, call.dtype)});
  call.external = call.on_device = true;
  request.is_unawaited = true;
  request.task = task;
  std::shared_ptr<GroupOperation> operation;
  if (has_gate_) {
    task->take_gate();
    operation = group_.calls().start(std::move(request), seconds_);
    task->queue_behind_gate();
    issuing_.unlock();
    if (!task->has_failed()) return;
  } else {
    task->queue_later();
    issuing_.unlock();
    operation = group_.calls().start(std::move(request), seconds_, &language_);
  }
  group_.calls().complete(*operation, language_);
  task->let_wait({stream_});
}

// A message that fails ends the group, and with it the other message: the failure of the first is raised.
void GpuDevice::exchange(MessageRequest sent, MessageRequest received) {
  const std::shared_ptr<GroupOperation> sending = start(sent), receiving = start(received);
  std::optional<OperationFailed> failed;
  for (GroupOperation* const operation : {receiving.get(), sending.get()}) {
    try {
      group_.calls().complete(*operation, language_);
    } catch (const OperationFailed& one) {
      if (!failed || failed->failure.is<Broken>()) failed = one;
    }
  }
  if (failed) throw OperationFailed(*failed);
  for (const MessageRequest& message : {sent, received}) static_cast<NcclTask&>(*message.task).let_wait({stream_});
}

// What has no gate may still use its memory when this call has failed.
std::shared_ptr<NcclTask> GpuDevice::task_for(NcclCall call) const {
  std::shared_ptr<const void> owner;
  if (!has_gate_) owner = std::make_shared<std::vector<std::shared_ptr<std::byte[]>>>(allocated_);
  return std::make_shared<NcclTask>(nccl_, std::move(call), std::vector{stream_}, true, std::move(owner));
}

std::shared_ptr<GroupOperation> GpuDevice::start(MessageRequest& request) const {
  NcclCall call{request.op, request.dtype, ReduceOp::kSum, 1, request.peer, {}, {}};
  (request.op == OpKind::kSend ? call.inputs : call.outputs) = spans_of({{request.data, request.count}}, request.dtype);
  request.task = task_for(std::move(call));
  request.external = request.on_device = request.is_unawaited = true;
  return group_.messages().start(request, seconds_);
}

void wait_until_copied(StagedTask& staged, int device, const char* what, double seconds, LanguageRuntime& language) {
  const Deadline deadline = Deadline::after(seconds);
  for (int looks = 1; !staged.ready(); ++looks) {
    if (looks % kLooksBetweenSignals == 0 && language.interrupted()) throw OperationFailed{Interrupted{}, {}};
    if (deadline.passed()) {
      std::ostringstream text;
      text << "GPU " << device << " has not finished the work that was queued before the " << what << ", after "
           << seconds << " s.";
      throw std::runtime_error(text.str());
    }
    std::this_thread::sleep_for(kPause);
  }
}

void run_on_copies(const XlaGpu& gpu, const FlatArrays& given, const FlatArrays& results, double seconds,
                   LanguageRuntime& language, const std::function<void(const FlatArrays&, const FlatArrays&)>& run) {
  StagedTask staged(gpu.gpu, {gpu.stream}, spans_of(given), spans_of(results), nullptr);
  wait_until_copied(staged, gpu.gpu.number(), "call", seconds, language);
  run(moved_to(staged.inputs(), given), moved_to(staged.outputs(), results));
  staged.start(-1, 0);
  staged.let_wait({gpu.stream});
}

}  // namespace procgroup
