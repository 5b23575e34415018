#include "xla/compiled_call.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace procgroup {
namespace {

Dtype dtype_of(xla::DataType type) {
  const std::optional<Dtype> found = find_dtype([type](const DtypeRow& row) { return row.xla == type; });
  if (found) return *found;
  throw std::invalid_argument("XLA gives an array of type " + std::to_string(type) + ", which cannot be sent");
}

std::byte no_elements{};

// Without what pads the structure, which XLA does not count.
constexpr size_t kMetadataBytes = offsetof(xla::Metadata, traits) + sizeof(xla::Metadata::traits);

xla::Metadata* metadata_of(const xla::CallFrame& frame) {
  const xla::Extension* const extension = frame.extensions;
  if (extension == nullptr || extension->type != xla::ExtensionType::kMetadata) return nullptr;
  return reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata;
}

}  // namespace

FlatArrays arrays_of(const xla::Buffers& buffers) {
  FlatArrays arrays;
  for (int64_t index = 0; index < buffers.size; ++index) {
    const xla::Buffer& buffer = *buffers.buffers[index];
    if (buffers.types[index] != xla::kBufferType || buffer.struct_size < sizeof(xla::Buffer))
      throw std::invalid_argument("XLA gives an argument that is not a buffer");
    if (buffer.dtype == xla::kToken) continue;
    size_t count = 1;
    for (int64_t dimension = 0; dimension < buffer.rank; ++dimension)
      count *= static_cast<size_t>(buffer.dimensions[dimension]);
    arrays.push_back({count == 0 ? &no_elements : buffer.data, dtype_of(buffer.dtype), count});
  }
  return arrays;
}

uint64_t attribute_of(const xla::Attributes& attributes, const char* name) {
  for (int64_t index = 0; index < attributes.size; ++index) {
    const xla::ByteSpan& found = *attributes.names[index];
    if (std::string_view(found.data, found.size) != name || attributes.types[index] != xla::AttributeType::kScalar)
      continue;
    const auto& scalar = *static_cast<const xla::Scalar*>(attributes.values[index]);
    if (scalar.dtype == xla::type_of(Dtype::kUint64)) return *static_cast<const uint64_t*>(scalar.value);
  }
  throw std::invalid_argument(std::string("XLA gives no attribute `") + name + "` of uint64");
}

xla::Error* read_stream(const xla::CallFrame& frame, CudaStream& stream) {
  const xla::Api& api = *frame.api;
  if (api.struct_size < offsetof(xla::Api, get_stream) + sizeof api.get_stream)
    return make_error(api, "this XLA does not give the stream of a call, which procgroup needs on a GPU");
  xla::StreamArguments arguments{sizeof arguments, nullptr, frame.context, nullptr};
  if (xla::Error* const error = api.get_stream(&arguments); error != nullptr) return error;
  if (arguments.stream == nullptr) return make_error(api, "XLA gives no stream for a call on a GPU");
  stream = arguments.stream;
  return nullptr;
}

xla::Error* make_error(const xla::Api& api, const std::string& text) {
  xla::ErrorArguments arguments{sizeof arguments, nullptr, text.c_str(), xla::ErrorCode::kInternal};
  return api.create_error(&arguments);
}

std::string misfit_of(const xla::CallFrame& frame) {
  const xla::Version& version = frame.api->version;
  const xla::Metadata* const metadata = metadata_of(frame);
  if (version.major == xla::kMajorVersion && version.minor >= xla::kMinorVersion &&
      frame.struct_size >= sizeof(xla::CallFrame) && (metadata == nullptr || metadata->struct_size >= kMetadataBytes))
    return "";
  return "procgroup was built for version " + std::to_string(xla::kMajorVersion) + "." +
         std::to_string(xla::kMinorVersion) + " of XLA's interface of handlers, and this XLA has version " +
         std::to_string(version.major) + "." + std::to_string(version.minor);
}

bool answer_metadata(const xla::CallFrame& frame) {
  xla::Metadata* const metadata = metadata_of(frame);
  if (metadata == nullptr) return false;
  metadata->version.major = xla::kMajorVersion;
  metadata->version.minor = xla::kMinorVersion;
  metadata->traits = 0;
  return true;
}

CompiledCall::CompiledCall(FunctionalCall call, const std::vector<Dtype>& dtypes) : call_(call), dtypes_(dtypes) {
  std::map<std::string_view, std::vector<size_t>> by_name;
  for (size_t index = 0; index < dtypes.size(); ++index) by_name[dtype_name(dtypes[index])].push_back(index);
  for (auto& [name, indices] : by_name) bundles_.push_back(std::move(indices));
}

void CompiledCall::require_compiled(const FlatArrays& arrays) const {
  if (!std::ranges::equal(arrays, dtypes_, {}, &FlatArray::dtype))
    throw std::invalid_argument("XLA gives other arrays than those that were compiled");
}

bool CompiledCall::goes_by_nccl(const NcclBackend& nccl, Dtype dtype) const {
  return nccl.supports(call_.op, dtype, reduces(call_.op) ? call_.reduce_op : ReduceOp::kSum);
}

bool CompiledCall::uses(const NcclBackend& nccl) const {
  return std::ranges::any_of(dtypes_, [&](Dtype dtype) { return goes_by_nccl(nccl, dtype); });
}

void CompiledCall::run(Group& group, const FlatArrays& given, const FlatArrays& results, double seconds,
                       LanguageRuntime& language, const XlaGpu* gpu) const {
  require_compiled(given);
  require_compiled(results);
  if (call_.op == OpKind::kBarrier) {
    Request request;
    request.source = call_.line;
    request.after_device_work = true;
    return group.calls().run(request, seconds, language);
  }
  const auto on_host = [&](const FlatArrays& inputs, const FlatArrays& outputs) {
    HostDevice device(group, seconds, language);
    call_.run(device, inputs, outputs);
  };
  for (const std::vector<size_t>& indices : bundles_) {
    FlatArrays inputs, outputs;
    for (const size_t index : indices) {
      inputs.push_back(given[index]);
      outputs.push_back(results[index]);
    }
    if (gpu == nullptr) {
      on_host(inputs, outputs);
    } else if (gpu->nccl && goes_by_nccl(*gpu->nccl, inputs.front().dtype)) {
      GpuDevice device(group, seconds, language, *gpu, call_.op);
      call_.run(device, inputs, outputs);
    } else {
      run_on_copies(*gpu, inputs, outputs, seconds, language, on_host);
    }
  }
}

}  // namespace procgroup
