#include "nccl/nccl_backend.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/file_descriptor.hpp"
#include "base/log.hpp"

namespace procgroup {
namespace {

constexpr double kCloseSeconds = 2;
// So far beyond the last call that no gate is closed, and not so far that the comparison wraps around.
constexpr uint32_t kAllGates = 1U << 30;

}  // namespace

NcclBackend::NcclBackend(int rank, int size, int device, bool may_gate, bool has_high_priority)
    : rank_(rank),
      size_(size),
      eager_device_(device),
      may_gate_(may_gate && size > 1),
      has_high_priority_(has_high_priority),
      generation_(fork_generation()) {}

// The gate's word is not used again: the thread of an abort may still open it.
NcclBackend::~NcclBackend() {
  if (was_forked()) return;
  abort();
  try {
    for (const auto& [ranks, queue] : queues_)
      if (queue.stream != nullptr) gpu().destroy_stream(queue.stream);  // when what is queued on it has ended
  } catch (const std::runtime_error&) {                                 // of a GPU that can do nothing any more
  }
}

bool NcclBackend::was_forked() const { return fork_generation() != generation_; }

bool NcclBackend::supports(OpKind op, Dtype dtype, ReduceOp reduce_op) const {
  // NCCL leaves out the last elements of what it scales in a group of one rank (2.28.9, as under PyTorch).
  if (size_ == 1 && reduce_op == ReduceOp::kPremulSum) return false;
  return nccl_supports(op, dtype, reduce_op);
}

// With the lock of the language, like all that comes before a call is issued.
void NcclBackend::load() {
  if (!library_) library_ = load_();
  if (is_eager()) use(eager_device_);
}

bool NcclBackend::use(int device) {
  if (is_eager() && device != eager_device_) return false;
  Gpu* none = nullptr;
  if (gpu_ == nullptr) gpu_.compare_exchange_strong(none, &Gpu::get(device));
  return gpu().number() == device;
}

std::string NcclBackend::refusal_of(OpKind op, int device) const {
  return std::string(op_name(op)) + ": the arrays are on GPU " + std::to_string(device) + ", but this group uses GPU " +
         std::to_string(this->device()) + " on this rank, as " + (is_eager() ? "device_id says" : "in its first call") +
         ". Move them there.";
}

CudaStream NcclBackend::stream_of(Pair ranks) {
  const std::lock_guard lock(mutex_);
  CudaStream& stream = queues_[ranks].stream;
  if (stream == nullptr) {
    const OnGpu on_gpu(gpu());
    stream = gpu().make_stream(has_high_priority_);
  }
  return stream;
}

std::shared_ptr<NcclCommunicator> NcclBackend::make_communicator(int rank, int size, const NcclId& id,
                                                                 std::string config) {
  const std::lock_guard lock(mutex_);
  if (is_aborted_) throw std::runtime_error("the group has failed");
  std::erase_if(made_, [](const std::weak_ptr<NcclCommunicator>& one) { return one.expired(); });
  std::shared_ptr<NcclCommunicator> made =
      NcclCommunicator::connect(library_, gpu(), size, rank, id, std::move(config));
  made_.push_back(made);
  return made;
}

void NcclBackend::set_communicator(Pair ranks, std::shared_ptr<NcclCommunicator> communicator) {
  const std::lock_guard lock(mutex_);
  queues_[ranks].communicator = communicator;
  if (ranks != kAll) return;
  communicator_ = std::move(communicator);
  is_connected_ = true;
}

std::shared_ptr<NcclCommunicator> NcclBackend::communicator_for(Pair ranks, uint64_t number) {
  if (ranks == kAll && is_connected_) return communicator_;
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

void NcclBackend::keep(std::shared_ptr<const void> owner) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(owner));
}

void NcclBackend::add_graph(std::weak_ptr<void> graph) {
  const std::lock_guard lock(mutex_);
  std::erase_if(graphs_, [](const std::weak_ptr<void>& one) { return one.expired(); });
  graphs_.push_back(std::move(graph));
}

bool NcclBackend::has_graphs() {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(graphs_, [](const std::weak_ptr<void>& one) { return !one.expired(); });
}

// What connects a communicator refers to this backend. Let go of without the mutex, because that may run Python.
void NcclBackend::drop_connecting() {
  std::vector<std::shared_ptr<Task>> dropped;
  const std::lock_guard lock(mutex_);
  for (auto& [ranks, queue] : queues_) dropped.push_back(std::exchange(queue.connecting, nullptr));
}

std::vector<std::shared_ptr<NcclCommunicator>> NcclBackend::communicators() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<NcclCommunicator>> all;
  for (const std::weak_ptr<NcclCommunicator>& one : made_)
    if (std::shared_ptr<NcclCommunicator> made = one.lock()) all.push_back(std::move(made));
  return all;
}

void NcclBackend::abort() {
  if (was_forked()) return;
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
  drop_connecting();
  if (was_forked()) return;
  // A call that stands behind its gate now never begins, nor does what stands behind it. A thread that issues one may
  // wait inside of NCCL.
  const std::unique_lock issuing(issuing_, std::try_to_lock);
  const Gpu::Word* const gate = gate_.load();
  const bool has_closed_gates =
      !issuing || (gate != nullptr && static_cast<int32_t>(gates_ - gate->load(std::memory_order_acquire)) > 0);
  if (failed || has_closed_gates) return abort();
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_aborted_, true)) return;
  }
  const bool has_graphs = this->has_graphs();
  if (has_graphs)
    log_line(LogLevel::kWarning,
             "this rank leaves a group whose calls are in CUDA graphs that still exist. NCCL's communicator ends with "
             "them: destroy them first, and do not launch them any more");
  NcclCommunicator::close(communicators(), has_graphs ? 0 : kCloseSeconds);
}

}  // namespace procgroup
