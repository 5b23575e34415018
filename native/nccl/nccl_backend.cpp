#include "nccl/nccl_backend.hpp"

#include <stdexcept>

namespace procgroup {
namespace {

constexpr double kCloseSeconds = 2;
// So far beyond the last call that no gate is closed, and not so far that the comparison wraps around.
constexpr uint32_t kAllGates = 1U << 30;

}  // namespace

NcclBackend::NcclBackend(int rank, int size, int device, bool may_gate)
    : rank_(rank), size_(size), is_eager_(device >= 0), may_gate_(may_gate && size > 1), device_(device) {}

NcclBackend::~NcclBackend() { abort(); }

bool NcclBackend::supports(OpKind op, Dtype dtype, ReduceOp reduce_op) const {
  // NCCL leaves out the last elements of what it scales in a group of one rank (2.28.9, as under PyTorch).
  if (size_ == 1 && reduce_op == ReduceOp::kPremulSum) return false;
  return nccl_supports(op, dtype, reduce_op);
}

// With the lock of the language, like all that comes before a call is issued.
void NcclBackend::load() {
  if (!library_) library_ = load_();
}

bool NcclBackend::use(int device) {
  int none = -1;
  return device_.compare_exchange_strong(none, device) || none == device;
}

CudaStream NcclBackend::stream_of(Pair ranks) {
  const std::lock_guard lock(mutex_);
  CudaStream& stream = queues_[ranks].stream;
  if (stream == nullptr) {
    const OnGpu on_gpu(gpu());
    stream = gpu().make_stream();
  }
  return stream;
}

std::shared_ptr<NcclCommunicator> NcclBackend::make_communicator(int rank, int size, const NcclId& id,
                                                                 std::string config) {
  const std::lock_guard lock(mutex_);
  if (is_aborted_) throw std::runtime_error("the group has failed");
  return NcclCommunicator::connect(library_, gpu(), size, rank, id, std::move(config));
}

void NcclBackend::set_communicator(Pair ranks, std::shared_ptr<NcclCommunicator> communicator) {
  const std::lock_guard lock(mutex_);
  queues_[ranks].communicator = std::move(communicator);
  if (ranks == kAll) is_connected_ = true;
}

std::shared_ptr<NcclCommunicator> NcclBackend::communicator_for(Pair ranks, uint64_t number) {
  std::shared_ptr<Task> connecting;
  {
    const std::lock_guard lock(mutex_);
    NcclQueue& queue = queues_[ranks];
    if (ranks != kAll && queue.next != number) return nullptr;
    if (queue.communicator) return queue.communicator;
    connecting = queue.connecting;
  }
  // Without the mutex, because this may run Python. Only the call whose turn it is comes here.
  if (!connecting) {
    connecting = connect_(ranks);
    connecting->start(-1, 0);
    const std::lock_guard lock(mutex_);
    queues_[ranks].connecting = connecting;
  }
  std::vector<int> awaited;
  if (connecting->test(awaited) != Task::State::kCompleted) return nullptr;
  const std::lock_guard lock(mutex_);
  queues_[ranks].connecting.reset();
  return queues_[ranks].communicator;
}

void NcclBackend::finish_turn(Pair ranks) {
  const std::lock_guard lock(mutex_);
  ++queues_[ranks].next;
}

bool NcclBackend::has_gate() {
  if (!may_gate_ || !is_connected_ || ungated_ != 0) return false;  // one rank agrees at once
  if (gate_.load() == nullptr) {
    const OnGpu on_gpu(gpu());
    if (!gpu().has_words()) return false;
    gate_.store(gpu().take_word());
  }
  return true;
}

void NcclBackend::let_wait(CudaStream stream, uint32_t gate) { gpu().let_wait(stream, gate_.load(), gate); }

// Calls agree in the order of their gates. An abort has opened all of them.
void NcclBackend::open(uint32_t gate) {
  Gpu::Word* const word = gate_.load();
  uint32_t opened = word->load(std::memory_order_relaxed);
  while (static_cast<int32_t>(gate - opened) > 0 &&
         !word->compare_exchange_weak(opened, gate, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

std::vector<std::shared_ptr<NcclCommunicator>> NcclBackend::communicators() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<NcclCommunicator>> all;
  for (const auto& [ranks, queue] : queues_)
    if (queue.communicator) all.push_back(queue.communicator);
  return all;
}

void NcclBackend::abort() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_aborted_, true)) return;
  }
  Gpu::Word* const gate = gate_.load();
  NcclCommunicator::abort(communicators(), [gate, opened = kAllGates] {
    if (gate != nullptr) gate->fetch_add(opened, std::memory_order_release);
  });
}

void NcclBackend::close(bool failed) {
  load_ = nullptr;
  connect_ = nullptr;
  if (failed) return abort();
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_aborted_, true)) return;
  }
  NcclCommunicator::close(communicators(), kCloseSeconds);
}

}  // namespace procgroup
