#include "xla/compiled_call.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace procgroup {
namespace {

constexpr std::array<std::pair<xla::DataType, Dtype>, kDtypes> kDtypesOfXla{{
    {xla::DataType::kBool, Dtype::kBool},
    {xla::DataType::kInt8, Dtype::kInt8},
    {xla::DataType::kInt16, Dtype::kInt16},
    {xla::DataType::kInt32, Dtype::kInt32},
    {xla::DataType::kInt64, Dtype::kInt64},
    {xla::DataType::kUint8, Dtype::kUint8},
    {xla::DataType::kUint16, Dtype::kUint16},
    {xla::DataType::kUint32, Dtype::kUint32},
    {xla::DataType::kUint64, Dtype::kUint64},
    {xla::DataType::kFloat16, Dtype::kFloat16},
    {xla::DataType::kBfloat16, Dtype::kBfloat16},
    {xla::DataType::kFloat32, Dtype::kFloat32},
    {xla::DataType::kFloat64, Dtype::kFloat64},
    {xla::DataType::kComplex64, Dtype::kComplex64},
    {xla::DataType::kComplex128, Dtype::kComplex128},
    {xla::DataType::kFloat8E4m3fn, Dtype::kFloat8E4m3fn},
    {xla::DataType::kFloat8E4m3fnuz, Dtype::kFloat8E4m3fnuz},
    {xla::DataType::kFloat8E5m2, Dtype::kFloat8E5m2},
    {xla::DataType::kFloat8E5m2fnuz, Dtype::kFloat8E5m2fnuz},
    {xla::DataType::kFloat8E8m0fnu, Dtype::kFloat8E8m0fnu},
}};

Dtype dtype_of(xla::DataType dtype) {
  for (const auto& [known, found] : kDtypesOfXla)
    if (known == dtype) return found;
  throw std::invalid_argument("XLA gives an array of type " + std::to_string(static_cast<int>(dtype)) +
                              ", which cannot be sent");
}

std::byte no_elements{};

// Without what pads the structure, which XLA does not count.
constexpr size_t kMetadataBytes = offsetof(xla::Metadata, traits) + sizeof(xla::Metadata::traits);

xla::Metadata* metadata_of(const xla::CallFrame& frame) {
  const xla::Extension* const extension = frame.extensions;
  if (extension == nullptr || extension->type != xla::ExtensionType::kMetadata) return nullptr;
  return reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata;
}

void run_collective(ArrayPlace& place, const CompiledCall::Options& options, const Bundle& given,
                    const Bundle& result) {
  const OpKind op = options.op;
  const bool is_root = place.group().rank() == options.root;
  Request request;
  request.source = options.line;
  request.descriptor.op = op;
  request.descriptor.dtype = given.dtype();
  request.descriptor.root = options.root;
  // The blocks of an all_to_all are described elsewhere, by pair of ranks.
  request.descriptor.count = op == OpKind::kAllToAll ? 0 : given.width();
  if (reduces(op)) {
    request.descriptor.reduce_op = options.reduce_op;
    request.factor = options.factor;
  }
  if (has_input_blocks(op))
    request.inputs = given.rows();
  else
    request.input = given.data();
  if (has_output_blocks(op))
    request.outputs = result.rows();
  else
    request.output = result.data();
  if (op == OpKind::kBroadcast) {  // which works on one array
    if (is_root) place.copy(result.data(), given.data(), result.bytes());
    request.input = result.data();
  }
  place.run(std::move(request));
  if (op == OpKind::kReduce && !is_root) place.clear(result.data(), result.bytes());
}

void exchange(ArrayPlace& place, const CompiledCall::Options& options, const Bundle& given, const Bundle& result) {
  if (options.root == place.group().rank())  // then it is the source, too
    return place.copy(result.data(), given.data(), result.bytes());
  const auto message = [&](OpKind op, const Bundle& array, int peer) {
    MessageRequest request{op, array.data(), array.width(), array.dtype(), peer, options.tag};
    request.source = options.line;
    return request;
  };
  place.exchange(message(OpKind::kSend, given, options.root), message(OpKind::kRecv, result, options.source));
}

void run_bundle(ArrayPlace& place, const CompiledCall::Options& options, const XlaArrays& inputs,
                const XlaArrays& outputs) {
  const OpKind op = options.op;
  const auto size = static_cast<size_t>(place.group().size());
  const Bundle given(place, inputs, has_input_blocks(op) ? size : 1);
  const Bundle result(place, outputs, has_output_blocks(op) ? size : 1);
  if (given.width() != result.width()) throw std::invalid_argument("XLA gives results of another size");
  given.pack();
  if (op == OpKind::kSend)
    exchange(place, options, given, result);
  else
    run_collective(place, options, given, result);
  result.unpack();
}

}  // namespace

XlaArrays arrays_of(const xla::Buffers& buffers) {
  XlaArrays arrays;
  for (int64_t index = 0; index < buffers.size; ++index) {
    const xla::Buffer& buffer = *buffers.buffers[index];
    if (buffers.types[index] != xla::kBufferType || buffer.struct_size < sizeof(xla::Buffer))
      throw std::invalid_argument("XLA gives an argument that is not a buffer");
    if (buffer.dtype == xla::DataType::kToken) continue;
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
    if (scalar.dtype == xla::DataType::kUint64) return *static_cast<const uint64_t*>(scalar.value);
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

CompiledCall::CompiledCall(Options options, const std::vector<Dtype>& dtypes) : options_(options), dtypes_(dtypes) {
  std::map<std::string_view, std::vector<size_t>> by_name;
  for (size_t index = 0; index < dtypes.size(); ++index) by_name[dtype_name(dtypes[index])].push_back(index);
  for (auto& [name, indices] : by_name) bundles_.push_back(std::move(indices));
}

void CompiledCall::require_compiled(const XlaArrays& arrays) const {
  if (!std::ranges::equal(arrays, dtypes_, {}, &XlaArray::dtype))
    throw std::invalid_argument("XLA gives other arrays than those that were compiled");
}

bool CompiledCall::goes_by_nccl(const NcclBackend& nccl, Dtype dtype) const {
  return nccl.supports(options_.op, dtype, reduces(options_.op) ? options_.reduce_op : ReduceOp::kSum);
}

void CompiledCall::run_on_host(Group& group, const Options& options, const XlaArrays& given, const XlaArrays& results,
                               double seconds, LanguageRuntime& language) {
  HostPlace place(group, seconds, language);
  run_bundle(place, options, given, results);
}

bool CompiledCall::uses(const NcclBackend& nccl) const {
  return std::ranges::any_of(dtypes_, [&](Dtype dtype) { return goes_by_nccl(nccl, dtype); });
}

void CompiledCall::run(Group& group, const XlaArrays& given, const XlaArrays& results, double seconds,
                       LanguageRuntime& language, const XlaGpu* gpu) const {
  require_compiled(given);
  require_compiled(results);
  if (options_.op == OpKind::kBarrier) {
    Request request;
    request.source = options_.line;
    request.after_device_work = true;
    return group.run(request, seconds, language);
  }
  const auto on_host = [&](const XlaArrays& inputs, const XlaArrays& outputs) {
    run_on_host(group, options_, inputs, outputs, seconds, language);
  };
  for (const std::vector<size_t>& indices : bundles_) {
    XlaArrays inputs, outputs;
    for (const size_t index : indices) {
      inputs.push_back(given[index]);
      outputs.push_back(results[index]);
    }
    if (gpu == nullptr) {
      on_host(inputs, outputs);
    } else if (gpu->nccl && goes_by_nccl(*gpu->nccl, inputs.front().dtype)) {
      NcclPlace place(group, seconds, language, *gpu, options_.op);
      run_bundle(place, options_, inputs, outputs);
    } else {
      run_on_copies(*gpu, inputs, outputs, seconds, language, on_host);
    }
  }
}

}  // namespace procgroup
