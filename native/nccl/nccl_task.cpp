#include "nccl/nccl_task.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "base/clock.hpp"
#include "dtype/preparation.hpp"

namespace procgroup {
namespace {

constexpr int64_t kCheckNs = 50'000'000;
constexpr int kHostValue = 1;  // ncclScalarHostImmediate: the factor is read at once
constexpr int64_t kLongReplayNs = 100'000'000;
// Values of a call's word, which the GPU writes when it has come to the end, and, in a graph, to the begin. A look at
// the latter leaves a mark: while that stays, one and the same replay runs.
constexpr uint32_t kDone = 1;
constexpr uint32_t kBegun = 2;
constexpr uint32_t kSeen = 3;

void* pointer(CudaAddress address) { return reinterpret_cast<void*>(address); }
void* pointer(const DeviceSpan& span) { return pointer(span.address); }

// Whether there are blocks, of one size: the same on all ranks.
bool are_equal(const std::vector<DeviceSpan>& spans) {
  return !spans.empty() &&
         std::ranges::all_of(spans, [&](const DeviceSpan& span) { return span.bytes == spans[0].bytes; });
}

// Whether blocks of one size follow each other without a gap.
bool are_one_piece(const std::vector<DeviceSpan>& spans) {
  for (size_t place = 0; place < spans.size(); ++place)
    if (spans[place].address != spans[0].address + place * spans[0].bytes) return false;
  return true;
}

bool has_bytes(const std::vector<DeviceSpan>& spans) {
  return std::ranges::any_of(spans, [](const DeviceSpan& span) { return span.bytes != 0; });
}

// The factor of PREMUL_SUM as an element of NCCL's.
std::array<std::byte, 8> as_element(double factor, int type) {
  constexpr std::array kTypes = {Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16};
  const Dtype dtype = kTypes[static_cast<size_t>(type) - 6];
  const uint16_t half = dtype == Dtype::kFloat16 ? 0x3c00 : 0x3f80;
  const float single = 1;
  const double full = 1;
  const void* one = dtype == Dtype::kFloat32   ? static_cast<const void*>(&single)
                    : dtype == Dtype::kFloat64 ? static_cast<const void*>(&full)
                                               : static_cast<const void*>(&half);
  std::array<std::byte, 8> element{};
  prepare(ReduceOp::kPremulSum, dtype, factor, element.data(), one, 1);
  return element;
}

}  // namespace

NcclTask::NcclTask(std::shared_ptr<NcclBackend> backend, NcclCall call, std::vector<CudaStream> streams, bool stays,
                   std::shared_ptr<const void> owner)
    : backend_(std::move(backend)),
      nccl_(*backend_->library()),
      gpu_(backend_->gpu()),
      call_(std::move(call)),
      owner_(std::move(owner)),
      streams_(std::move(streams)),
      stays_(stays && !streams_.empty() && !is_message(call_.op)) {
  if (call_.reduce_op == ReduceOp::kAvg && backend_->size() == 1) call_.reduce_op = ReduceOp::kSum;  // see supports()
  if (stays_) stream_ = streams_[0];
  const OnGpu on_gpu(gpu_);
  for (const CudaStream stream : streams_) is_captured_ = is_captured_ || gpu_.is_capturing(stream);
  for (const CudaStream stream : streams_)
    if (stream != stream_) events_.push_back(gpu_.record(stream));
}

// The arrays of a call that failed are kept as long as the group, because the GPU may still use them. Those of the
// others go with the last owner of the task: the thread that watches over calls would have to wait for Python's lock
// for that.
//
// The events may still be waited for by streams, which is no use of theirs that a later recording changes; but who asks
// for one must get the answer for this call. A graph that still exists may write the word.
NcclTask::~NcclTask() {
  if (backend_->was_forked()) return;
  for (const CudaEvent event : events_) gpu_.give_back(event);
  if (ended_.load() != nullptr) gpu_.give_back(ended_.load());
  if (is_captured_) {
    if (done_ != nullptr && graph_.expired()) gpu_.give_back(done_);
    return;
  }
  if (done_ != nullptr && done_->load() == kDone)
    gpu_.give_back(done_);
  else if (communicator_ != nullptr && !has_come_to_its_end_)
    backend_->keep(std::move(owner_));
}

void NcclTask::queue_behind_gate() try {
  const OnGpu on_gpu(gpu_);
  if (!stays_) stream_ = backend_->stream_of(NcclBackend::kAll);
  backend_->let_wait(stream_, gate_);
  communicator_ = backend_->communicator_for(NcclBackend::kAll, 0);
  queue();
} catch (const std::runtime_error& error) {
  fail(error.what());
}

// The thread's own default stream is another one in the thread that queues the call.
void NcclTask::queue_later() {
  is_later_ = true;
  backend_->add_ungated();
  if (is_captured_ || stream_ != per_thread_stream()) return;
  stays_ = false;
  const OnGpu on_gpu(gpu_);
  events_.push_back(gpu_.record(stream_));
}

void NcclTask::capture() {
  const OnGpu on_gpu(gpu_);
  if (!stays_) stream_ = backend_->stream_of(NcclBackend::kCaptured);
  communicator_ = backend_->communicator_for(NcclBackend::kAll, 0);
  queue();
  const auto graph = std::make_shared<char>();
  graph_ = graph;
  backend_->add_graph(graph);
  gpu_.keep_with_graph(stream_, graph);
  backend_->set_capturing(false);
}

void NcclTask::require_no_error() const {
  if (has_failed()) throw std::runtime_error(error_);
}

bool NcclTask::ready() {
  require_no_error();
  return true;
}

void NcclTask::start(int root, uint64_t number) {
  require_no_error();
  if (is_captured_) return backend_->set_capturing(true);
  if (gate_ != 0) return backend_->open(gate_);
  call_.root = root;
  number_ = number;
}

Task::State NcclTask::test(std::vector<int>& awaited) {
  require_no_error();
  if (is_captured_) return replay();
  if (gate_ == 0 && !is_posted_) is_posted_ = post();
  if (is_queued_.load(std::memory_order_acquire)) {
    has_come_to_its_end_ = has_come_to_its_end_ || has_ended();
    return has_come_to_its_end_ ? State::kCompleted : State::kQueued;
  }
  if (gate_ != 0) return State::kQueued;
  if (!is_message(call_.op)) awaited.clear();
  return State::kPending;
}

// Whether it is done: the communicator may not be there yet. NCCL may wait for other ranks, but not for the only one.
bool NcclTask::post() {
  if (backend_->is_capturing()) return false;
  communicator_ = backend_->communicator_for(ranks(), number_);
  if (communicator_ == nullptr) return false;
  if (backend_->size() == 1) {
    const OnGpu on_gpu(gpu_);
    queue();
    return true;
  }
  communicator_->post([self = shared_from_this()] {
    try {
      const OnGpu on_gpu(self->gpu_);
      self->queue();
    } catch (const std::runtime_error& error) {
      self->fail(error.what());
    }
  });
  return true;
}

void NcclTask::fail(const char* error) {
  error_ = error;
  has_failed_.store(true, std::memory_order_release);
}

NcclBackend::Pair NcclTask::ranks() const {
  if (call_.op == OpKind::kSend) return {backend_->rank(), call_.root};
  return call_.op == OpKind::kRecv ? NcclBackend::Pair{call_.root, backend_->rank()} : NcclBackend::kAll;
}

NcclType NcclTask::type() const { return nccl_reduction(call_.reduce_op, call_.dtype).value_or(kNcclBytes); }

// The GPU is the current one of the thread.
void NcclTask::queue() {
  if (!stays_) stream_ = backend_->stream_of(ranks());
  for (const CudaEvent event : events_) gpu_.let_wait(stream_, event);
  const bool has_words = gpu_.has_words();
  if (has_words) done_ = gpu_.take_word();
  if (has_words && is_captured_) gpu_.write(stream_, done_, kBegun);
  if (has_bytes(call_.inputs) || has_bytes(call_.outputs)) make(*communicator_);
  if (has_words && is_captured_) gpu_.write(stream_, done_, kDone);  // before the event that joins it to the capture
  if (!stays_ || streams_.size() > 1 || !has_words || is_captured_) ended_.store(gpu_.record(stream_));
  if (stays_ && (gate_ != 0 || is_captured_))  // in the caller's thread, which does not wait for the call
    for (const CudaStream stream : streams_)
      if (stream != stream_) gpu_.let_wait(stream, ended_.load());
  if (has_words && !is_captured_) gpu_.write(stream_, done_, kDone);
  is_queued_.store(true, std::memory_order_release);
  if (is_message(call_.op)) backend_->finish_turn(ranks());
  if (is_later_) backend_->remove_ungated();
}

// Which of NCCL's operations moves the blocks must not depend on where they are, which may differ between ranks: it
// depends on their sizes, on which all ranks agree. So blocks of one size that are scattered are copied into one piece
// before the call, or out of it after the call.
void NcclTask::make(NcclCommunicator& communicator) {
  std::vector<DeviceSpan> none;
  std::vector<DeviceSpan>& blocks = call_.op == OpKind::kAllGather       ? call_.outputs
                                    : call_.op == OpKind::kReduceScatter ? call_.inputs
                                                                         : none;
  const std::vector<DeviceSpan> places = blocks;
  const bool are_apart = is_apart(blocks);
  if (are_apart) {
    const size_t bytes = blocks[0].bytes;
    scratch_ = gpu_.allocate(stream_, bytes * blocks.size());
    for (size_t place = 0; place < blocks.size(); ++place) blocks[place].address = scratch_ + place * bytes;
    if (call_.op == OpKind::kReduceScatter)
      for (size_t place = 0; place < blocks.size(); ++place)
        gpu_.copy(stream_, blocks[place].address, places[place].address, bytes);
  }
  op_ = type().op;
  communicator.call(!is_one_call(), [&](NcclHandle handle) {
    if (call_.reduce_op != ReduceOp::kPremulSum) return call_nccl(handle);
    const auto factor = as_element(call_.factor, type().number);
    if (const int result = nccl_.ncclRedOpCreatePreMulSum(&op_, factor.data(), type().number, kHostValue, handle);
        result != 0)
      return result;
    const int result = call_nccl(handle);
    const int destroyed = nccl_.ncclRedOpDestroy(op_, handle);
    return result != 0 ? result : destroyed;
  });
  if (!are_apart) return;
  if (call_.op == OpKind::kAllGather)
    for (size_t place = 0; place < blocks.size(); ++place)
      gpu_.copy(stream_, places[place].address, blocks[place].address, places[place].bytes);
  gpu_.free(stream_, scratch_);
}

bool NcclTask::is_apart(const std::vector<DeviceSpan>& blocks) { return are_equal(blocks) && !are_one_piece(blocks); }

bool NcclTask::is_one_call() const {
  switch (call_.op) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return call_.inputs.size() == 1;
    case OpKind::kAllGather:
      return are_equal(call_.outputs);
    case OpKind::kReduceScatter:
      return are_equal(call_.inputs);
    default:
      return call_.op == OpKind::kBroadcast || call_.op == OpKind::kSend || call_.op == OpKind::kRecv;
  }
}

// Make the calls of NCCL's that together move the bytes; stop at the first error.
int NcclTask::call_nccl(NcclHandle communicator) const {
  const std::vector<DeviceSpan>& inputs = call_.inputs;
  const std::vector<DeviceSpan>& outputs = call_.outputs;
  const CudaStream stream = stream_;
  const NcclType reduced = type();
  const int rank = backend_->rank();
  int result = 0;
  const auto broadcast = [&](int root, const DeviceSpan& from, const DeviceSpan& to) {
    if (result == 0 && to.bytes != 0)
      result = nccl_.ncclBroadcast(pointer(from), pointer(to), to.bytes, kNcclBytes.number, root, communicator, stream);
  };
  const auto reduce = [&](int root, const DeviceSpan& from, const DeviceSpan& to) {
    if (result == 0 && from.bytes != 0)
      result = nccl_.ncclReduce(pointer(from), pointer(to), from.bytes / reduced.bytes, reduced.number, op_, root,
                                communicator, stream);
  };
  const auto send = [&](int peer, const DeviceSpan& span) {
    if (result == 0 && span.bytes != 0)
      result = nccl_.ncclSend(pointer(span), span.bytes, kNcclBytes.number, peer, communicator, stream);
  };
  const auto receive = [&](int peer, const DeviceSpan& span) {
    if (result == 0 && span.bytes != 0)
      result = nccl_.ncclRecv(pointer(span), span.bytes, kNcclBytes.number, peer, communicator, stream);
  };
  switch (call_.op) {
    case OpKind::kAllReduce:
      for (size_t place = 0; place < inputs.size() && result == 0; ++place)
        if (inputs[place].bytes != 0)
          result = nccl_.ncclAllReduce(pointer(inputs[place]), pointer((outputs.empty() ? inputs : outputs)[place]),
                                       inputs[place].bytes / reduced.bytes, reduced.number, op_, communicator, stream);
      break;
    case OpKind::kReduce:
      reduce(call_.root, inputs[0], outputs.empty() ? inputs[0] : outputs[0]);
      break;
    case OpKind::kBroadcast: {
      const DeviceSpan& span = inputs.empty() ? outputs[0] : inputs[0];
      broadcast(call_.root, span, span);
      break;
    }
    case OpKind::kAllGather:
      if (are_equal(outputs)) {
        result = nccl_.ncclAllGather(pointer(inputs[0]), pointer(outputs[0]), inputs[0].bytes, kNcclBytes.number,
                                     communicator, stream);
        break;
      }
      for (int root = 0; root < backend_->size(); ++root) {
        const DeviceSpan& span = outputs[static_cast<size_t>(root)];
        broadcast(root, root == rank ? inputs[0] : span, span);
      }
      break;
    case OpKind::kReduceScatter:
      if (are_equal(inputs)) {
        result = nccl_.ncclReduceScatter(pointer(inputs[0]), pointer(outputs[0]), outputs[0].bytes / reduced.bytes,
                                         reduced.number, op_, communicator, stream);
        break;
      }
      for (int root = 0; root < backend_->size(); ++root) {
        const DeviceSpan& span = inputs[static_cast<size_t>(root)];
        reduce(root, span, root == rank ? outputs[0] : span);
      }
      break;
    case OpKind::kSend:
      send(1, inputs[0]);  // in a communicator of the sender and the receiver
      break;
    case OpKind::kRecv:
      receive(0, outputs[0]);
      break;
    default:  // gather, scatter and the operations by pair, which may have several blocks for a rank, are messages
      for (size_t place = 0; place < inputs.size(); ++place)
        send(call_.op == OpKind::kGather ? call_.root : static_cast<int>(place) % backend_->size(), inputs[place]);
      for (size_t place = 0; place < outputs.size(); ++place)
        receive(call_.op == OpKind::kScatter ? call_.root : static_cast<int>(place) % backend_->size(), outputs[place]);
  }
  return result;
}

bool NcclTask::has_ended() {
  if (done_ != nullptr && done_->load(std::memory_order_acquire) == kDone) return true;
  check_sometimes();
  if (done_ != nullptr) return false;
  const OnGpu on_gpu(gpu_);
  return gpu_.has_come(ended_.load());
}

// Throw for errors of what is queued. Not at the first look: most calls end soon.
void NcclTask::check_sometimes() {
  if (now_ns() - checked_ns_ <= kCheckNs || NcclCommunicator::is_freeing()) return;
  if (checked_ns_ != 0) {
    const OnGpu on_gpu(gpu_);
    communicator_->check();
    gpu_.check(backend_->stream_of(NcclBackend::kAll));
  }
  checked_ns_ = now_ns();
}

Task::State NcclTask::replay() {
  if (!is_queued_.load(std::memory_order_acquire) || graph_.expired()) return State::kCompleted;
  if (done_ == nullptr) return State::kPending;
  uint32_t value = done_->load(std::memory_order_acquire);
  if (value == kBegun && done_->compare_exchange_strong(value, kSeen)) seen_ns_ = now_ns();
  if (value != kSeen || now_ns() - seen_ns_ < kLongReplayNs) return State::kIdle;
  check_sometimes();
  return State::kQueued;
}

void NcclTask::let_wait(const std::vector<CudaStream>& streams) {
  const CudaEvent ended = ended_.load();
  if (ended == nullptr) return;
  const OnGpu on_gpu(gpu_);
  for (const CudaStream stream : streams) gpu_.let_wait(stream, ended);
}

}  // namespace procgroup
