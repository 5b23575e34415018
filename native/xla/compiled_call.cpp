#include "xla/compiled_call.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "ops/premultiply.hpp"

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

}  // namespace

std::vector<XlaArray> arrays_of(const xla::Buffers& buffers) {
  std::vector<XlaArray> arrays;
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

// The arrays of one dtype: `rows` rows, and in each of them the same part of every array, one after the other.
class CompiledCall::Bundle {
 public:
  Bundle(const std::vector<XlaArray>& arrays, const std::vector<size_t>& indices, size_t rows)
      : dtype_(arrays[indices.front()].dtype), rows_(rows) {
    for (const size_t index : indices) {
      parts_.push_back({arrays[index].data, arrays[index].count / rows});
      width_ += parts_.back().count;
    }
    if (parts_.size() > 1) scratch_.reset(new std::byte[bytes()]);
  }

  Dtype dtype() const { return dtype_; }
  size_t width() const { return width_; }  // elements of a row
  size_t bytes() const { return rows_ * width_ * dtype_size(dtype_); }
  void* data() const { return scratch_ ? scratch_.get() : parts_.front().data; }
  std::vector<Block> rows() const {
    std::vector<Block> rows(rows_);
    for (size_t row = 0; row < rows_; ++row)
      rows[row] = {static_cast<std::byte*>(data()) + row * width_ * dtype_size(dtype_), width_};
    return rows;
  }

  void pack() const {
    for_each_part([](std::byte* packed, std::byte* part, size_t size) { std::memcpy(packed, part, size); });
  }
  void unpack() const {
    for_each_part([](std::byte* packed, std::byte* part, size_t size) { std::memcpy(part, packed, size); });
  }

 private:
  template <class Copy>
  void for_each_part(Copy copy) const {
    if (!scratch_) return;
    std::byte* packed = scratch_.get();
    for (size_t row = 0; row < rows_; ++row)
      for (const Block& part : parts_) {
        const size_t size = part.count * dtype_size(dtype_);
        copy(packed, static_cast<std::byte*>(part.data) + row * size, size);
        packed += size;
      }
  }

  Dtype dtype_;
  size_t rows_;
  size_t width_ = 0;
  std::vector<Block> parts_;  // of the first row
  std::unique_ptr<std::byte[]> scratch_;
};

CompiledCall::CompiledCall(Options options, const std::vector<Dtype>& dtypes) : options_(options), dtypes_(dtypes) {
  std::map<std::string_view, std::vector<size_t>> by_name;
  for (size_t index = 0; index < dtypes.size(); ++index) by_name[dtype_name(dtypes[index])].push_back(index);
  for (auto& [name, indices] : by_name) bundles_.push_back(std::move(indices));
}

void CompiledCall::require_compiled(const std::vector<XlaArray>& arrays) const {
  if (!std::ranges::equal(arrays, dtypes_, {}, &XlaArray::dtype))
    throw std::invalid_argument("XLA gives other arrays than those that were compiled");
}

void CompiledCall::run(Group& group, const std::vector<XlaArray>& given, const std::vector<XlaArray>& results,
                       double seconds, LanguageRuntime& language) const {
  require_compiled(given);
  require_compiled(results);
  if (options_.op == OpKind::kBarrier) {
    Request request;
    request.source = options_.line;
    request.after_device_work = true;
    return group.run(request, seconds, language);
  }
  const auto size = static_cast<size_t>(group.size());
  for (const std::vector<size_t>& indices : bundles_) {
    const Bundle input(given, indices, has_input_blocks(options_.op) ? size : 1);
    const Bundle output(results, indices, has_output_blocks(options_.op) ? size : 1);
    if (input.width() != output.width()) throw std::invalid_argument("XLA gives results of another size");
    input.pack();
    run_bundle(group, input, output, seconds, language);
    output.unpack();
  }
}

void CompiledCall::run_bundle(Group& group, const Bundle& given, const Bundle& result, double seconds,
                              LanguageRuntime& language) const {
  const OpKind op = options_.op;
  if (op == OpKind::kSend) return exchange(group, given, result, seconds, language);
  Request request;
  request.source = options_.line;
  request.descriptor.op = op;
  request.descriptor.dtype = given.dtype();
  request.descriptor.root = options_.root;
  // The blocks of an all_to_all are described elsewhere, by pair of ranks.
  request.descriptor.count = op == OpKind::kAllToAll ? 0 : given.width();
  if (reduces(op)) {
    request.descriptor.reduce_op = options_.reduce_op;
    request.factor = options_.factor;
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
    if (group.rank() == options_.root) std::memcpy(result.data(), given.data(), result.bytes());
    request.input = result.data();
  }
  if (request.factor != 1.0) premultiply(request);
  group.run(request, seconds, language);
  if (op == OpKind::kReduce && group.rank() != options_.root) std::memset(result.data(), 0, result.bytes());
}

// Where the receive fails, the message that is sent stays on its way, as that of another asynchronous send: what is not
// sent at once has memory of its own, because XLA's may be gone by then.
void CompiledCall::exchange(Group& group, const Bundle& given, const Bundle& result, double seconds,
                            LanguageRuntime& language) const {
  if (options_.root == group.rank()) {  // then it is the source, too
    std::memcpy(result.data(), given.data(), result.bytes());
    return;
  }
  const auto message = [&](OpKind op, const Bundle& array, int peer) {
    MessageRequest request{op, array.data(), array.width(), array.dtype(), peer, options_.tag};
    request.source = options_.line;
    return request;
  };
  MessageRequest sent = message(OpKind::kSend, given, options_.root);
  std::shared_ptr<GroupOperation> sending;
  if (!group.start_at_once(sent)) {
    const std::shared_ptr<std::byte[]> copy(new std::byte[given.bytes()]);
    std::memcpy(copy.get(), given.data(), given.bytes());
    sent.data = copy.get();
    sent.after = [copy] {};  // the operation owns it
    sending = group.start_message(sent, seconds);
  }
  group.run_message(message(OpKind::kRecv, result, options_.source), seconds, language);
  if (!sending) return;
  bool interrupted = false;
  const std::optional<Failure> failure = group.await(*sending, Deadline::never(), language, interrupted).failure;
  if (interrupted) throw OperationFailed{{.kind = Failure::Kind::kInterrupted}, sending->call()};
  if (failure) throw group.reported(*failure, sending->call());
}

}  // namespace procgroup
