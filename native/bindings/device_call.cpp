#include "device_call.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "cuda_array.hpp"
#include "exceptions.hpp"
#include "python_host.hpp"
#include "python_task.hpp"
#include "torch_tensor.hpp"
#include "xla/gpu_device.hpp"

namespace nb = nanobind;

namespace procgroup {
namespace {

std::vector<DeviceSpan> spans_of(std::span<const Block> blocks, Dtype dtype) {
  std::vector<DeviceSpan> spans;
  spans.reserve(blocks.size());
  for (const Block& block : blocks)
    spans.push_back({reinterpret_cast<CudaAddress>(block.data), block.count * dtype_size(dtype)});
  return spans;
}

// An error of the driver, or of NCCL, before anything is sent.
template <class Step>
auto with_backend_error(Step step) {
  try {
    return step();
  } catch (const std::runtime_error& error) {
    raise(nb::module_::import_("procgroup.errors").attr("DistBackendError")(error.what()));
  }
}

}  // namespace

void ArrayStreams::add(CudaStream stream) {
  if (stream == nullptr)
    has_unordered = true;
  else if (std::ranges::find(streams, stream) == streams.end())
    streams.push_back(stream);
}

CudaStream current_stream(const ArrayView& array) {
  CudaStream stream = nullptr;
  if (read_torch_stream(array.array(), array.device(), stream) || read_cuda_stream(array.array(), stream))
    return stream;
  const nb::object given = nb::module_::import_("procgroup.arrays.cuda_array").attr("current_stream")(array.array());
  return given.is_none() ? nullptr : reinterpret_cast<CudaStream>(nb::cast<uintptr_t>(given));
}

ArrayStreams current_streams(const std::vector<ArrayView>& arrays) {
  ArrayStreams used;
  for (const ArrayView& array : arrays) used.add(current_stream(array));
  return used;
}

bool are_capturing(const ArrayStreams& used, int device) {
  return with_backend_error([&] {
    const Gpu& gpu = Gpu::get(device);
    const OnGpu on_gpu(gpu);
    return std::ranges::any_of(used.streams, [&](CudaStream stream) { return gpu.is_capturing(stream); });
  });
}

std::shared_ptr<StagedTask> stage(Request& request, std::shared_ptr<const KeptMemory> memory, const ArrayStreams& used,
                                  int rank) {
  const Descriptor& call = request.descriptor;
  const int device = memory->arrays.front().device();
  Block input, output;
  const std::vector<DeviceSpan> inputs = spans_of(inputs_of(request, rank, input), call.dtype);
  const std::vector<DeviceSpan> outputs = spans_of(outputs_of(request, rank, output), call.dtype);
  const auto staged = with_backend_error(
      [&] { return std::make_shared<StagedTask>(Gpu::get(device), used.streams, inputs, outputs, std::move(memory)); });
  const std::vector<void*>& read = staged->inputs();
  const std::vector<void*>& written = staged->outputs();
  const bool is_in_place = request.input != nullptr && request.input == request.output;
  for (size_t index = 0; index < request.inputs.size(); ++index) request.inputs[index].data = read.at(index);
  for (size_t index = 0; index < request.outputs.size(); ++index) request.outputs[index].data = written.at(index);
  if (!has_input_blocks(call.op)) request.input = read.empty() ? nullptr : read[0];
  if (!has_output_blocks(call.op)) request.output = written.empty() ? nullptr : written[0];
  if (is_in_place && read.empty()) request.input = request.output;
  if (is_in_place && written.empty()) request.output = const_cast<void*>(request.input);
  return staged;
}

void wait_until_copied(StagedTask& staged, int device, double seconds) {
  UnlockedPythonRuntime language;
  try {
    with_backend_error([&] {
      const Unlocked unlocked;
      wait_until_copied(staged, device, "send", seconds, language);
    });
  } catch (const OperationFailed&) {
    language.rethrow();
  }
}

std::shared_ptr<NcclMemory> allocate_by_nccl(NcclBackend& backend, size_t bytes) {
  return with_backend_error([&] { return std::make_shared<NcclMemory>(backend.library(), backend.gpu(), bytes); });
}

std::shared_ptr<NcclTask> move_by_nccl(const std::shared_ptr<NcclBackend>& backend, const Request& request,
                                       std::shared_ptr<const KeptMemory> memory, std::vector<CudaStream> streams,
                                       bool stays) {
  const Descriptor& call = request.descriptor;
  const int device = memory->arrays.front().device();
  backend->load();
  if (!backend->use(device))
    raise(nb::module_::import_("procgroup.errors").attr("ArgumentError")(backend->refusal_of(call.op, device)));
  Block input, output;
  const int rank = backend->rank();
  const bool is_in_place = call.op == OpKind::kAllReduce;
  NcclCall moved{
      .op = call.op,
      .dtype = call.dtype,
      .reduce_op = reduces(call.op) ? call.reduce_op : ReduceOp::kSum,
      .factor = request.factor,
      .root = call.root,
      .inputs =
          spans_of(is_in_place && !request.inputs.empty() ? std::span(request.inputs) : inputs_of(request, rank, input),
                   call.dtype),
      .outputs = spans_of(is_in_place ? std::span<const Block>() : outputs_of(request, rank, output), call.dtype)};
  return with_backend_error([&] {
    return std::make_shared<NcclTask>(backend, std::move(moved), std::move(streams), stays, std::move(memory));
  });
}

}  // namespace procgroup
