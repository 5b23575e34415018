#include "xla/functional_call.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "group/group_operation.hpp"
#include "ops/preparation.hpp"

namespace procgroup {

std::shared_ptr<std::byte[]> HostDevice::allocate(size_t bytes) {
  return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
}

void HostDevice::copy(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }

void HostDevice::clear(void* at, size_t bytes) const { std::memset(at, 0, bytes); }

void HostDevice::run(Request request) {
  prepare(request);
  group_.calls().run(request, seconds_, language_);
}

// Where the receive fails, the message that is sent stays on its way, as that of another asynchronous send: what is not
// sent at once has memory of its own, because XLA's may be gone by then.
void HostDevice::exchange(MessageRequest sent, MessageRequest received) {
  std::shared_ptr<GroupOperation> sending;
  if (!group_.messages().start_at_once(sent)) {
    const size_t bytes = sent.count * dtype_size(sent.dtype);
    const std::shared_ptr<std::byte[]> copied = allocate(bytes);
    copy(copied.get(), sent.data, bytes);
    sent.data = copied.get();
    sent.after = [copied] {};  // the operation owns it
    sending = group_.messages().start(sent, seconds_);
  }
  group_.messages().run(received, seconds_, language_);
  if (!sending) return;
  const CallQueue::Outcome outcome = group_.calls().await(*sending, Deadline::never(), language_);
  if (outcome.is_interrupted) throw OperationFailed{Interrupted{}, sending->call()};
  if (outcome.failure) throw group_.end().reported(*outcome.failure, sending->call());
}

namespace {

// The arrays of one dtype: `rows` rows, and in each of them the same part of every array, one after the other.
class Bundle {
 public:
  Bundle(CallDevice& device, const FlatArrays& arrays, size_t rows)
      : device_(device), dtype_(arrays.front().dtype), rows_(rows) {
    for (const FlatArray& array : arrays) {
      parts_.push_back({array.data, array.count / rows});
      width_ += parts_.back().count;
    }
    if ((parts_.size() > 1 || device.needs_scratch()) && bytes() != 0) scratch_ = device.allocate(bytes());
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
    for_each_part([this](std::byte* packed, std::byte* part, size_t size) { device_.copy(packed, part, size); });
  }
  void unpack() const {
    for_each_part([this](std::byte* packed, std::byte* part, size_t size) { device_.copy(part, packed, size); });
  }

 private:
  template <class Copy>
  void for_each_part(Copy copy) const {
    if (!scratch_) return;
    std::byte* packed = scratch_.get();
    for (size_t row = 0; row < rows_; ++row)
      for (const Block& part : parts_) {
        const size_t size = part.count * dtype_size(dtype_);
        if (size != 0) copy(packed, static_cast<std::byte*>(part.data) + row * size, size);
        packed += size;
      }
  }

  const CallDevice& device_;
  Dtype dtype_;
  size_t rows_;
  size_t width_ = 0;
  std::vector<Block> parts_;              // of the first row
  std::shared_ptr<std::byte[]> scratch_;  // null where the only array is used where it is
};

void run_collective(CallDevice& device, const FunctionalCall& call, const Bundle& given, const Bundle& result) {
  const OpKind op = call.op;
  const bool is_root = device.group().rank() == call.root;
  Request request;
  request.source = call.line;
  request.descriptor.op = op;
  request.descriptor.dtype = given.dtype();
  request.descriptor.root = call.root;
  // Blocks that differ by pair of ranks are described elsewhere.
  request.descriptor.count = is_by_pair(op) ? 0 : given.width();
  if (reduces(op)) {
    request.descriptor.reduce_op = call.reduce_op;
    request.factor = call.factor;
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
    if (is_root) device.copy(result.data(), given.data(), result.bytes());
    request.input = result.data();
  }
  device.run(std::move(request));
  if (op == OpKind::kReduce && !is_root) device.clear(result.data(), result.bytes());
}

void exchange(CallDevice& device, const FunctionalCall& call, const Bundle& given, const Bundle& result) {
  if (call.root == device.group().rank())  // then it is the source, too
    return device.copy(result.data(), given.data(), result.bytes());
  const auto message = [&](OpKind op, const Bundle& array, int peer) {
    MessageRequest request{op, array.data(), array.width(), array.dtype(), peer, call.tag};
    request.source = call.line;
    return request;
  };
  device.exchange(message(OpKind::kSend, given, call.root), message(OpKind::kRecv, result, call.source));
}

}  // namespace

void FunctionalCall::run(CallDevice& device, const FlatArrays& inputs, const FlatArrays& outputs) const {
  const auto size = static_cast<size_t>(device.group().size());
  const Bundle given(device, inputs, has_input_blocks(op) ? size : 1);
  const Bundle result(device, outputs, has_output_blocks(op) ? size : 1);
  if (given.width() != result.width()) throw std::invalid_argument("XLA gives results of another size");
  given.pack();
  if (op == OpKind::kSend)
    exchange(device, *this, given, result);
  else
    run_collective(device, *this, given, result);
  result.unpack();
}

}  // namespace procgroup
