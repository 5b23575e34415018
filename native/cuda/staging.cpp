#include "cuda/staging.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>

#include "base/file_descriptor.hpp"

namespace procgroup {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallestBlock = size_t{1} << 16;
constexpr size_t kMostFreeBytes = size_t{1} << 28;  // of one GPU, kept for later calls

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// The host memory and the streams of one GPU. Blocks have powers of two as sizes.
class StagingMemory {
 public:
  // That of a GPU, for the life of the process.
  static StagingMemory& of(Gpu& gpu) {
    static std::mutex mutex;
    static auto* const all = new std::map<int, std::unique_ptr<StagingMemory>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<StagingMemory>& memory = (*all)[gpu.number()];
    if (memory == nullptr) memory.reset(new StagingMemory(gpu));
    return *memory;
  }

  // A forked child can use no GPU, and the mutex may be held for ever.
  bool was_forked() const { return fork_generation() != generation_; }

  void* take(size_t bytes) {
    {
      Owners ended;
      const std::lock_guard lock(mutex_);
      sweep(ended);
      std::vector<void*>& blocks = free_[bytes];
      if (!blocks.empty()) {
        void* const block = blocks.back();
        blocks.pop_back();
        free_bytes_ -= bytes;
        return block;
      }
    }
    void* const block = map_registered(bytes);
    bytes_ += bytes;
    return block;
  }

  size_t bytes() const { return bytes_; }

  // Free a block, and let go of what `owner` owns, when the events have come; events that are null have.
  void keep(void* block, size_t bytes, std::vector<CudaEvent> events, std::shared_ptr<const void> owner) {
    const std::lock_guard lock(mutex_);
    used_.push_back({block, bytes, std::move(events), std::move(owner)});
  }

  // Free what is not used any more.
  void tidy() {
    Owners ended;
    const std::lock_guard lock(mutex_);
    sweep(ended);
  }

  const CudaStream in;
  const CudaStream out;

 private:
  using Owners = std::vector<std::shared_ptr<const void>>;  // let go of without the mutex: that may run Python

  struct Used {
    void* block;
    size_t bytes;
    std::vector<CudaEvent> events;
    std::shared_ptr<const void> owner;
  };

  explicit StagingMemory(Gpu& gpu)
      : in(gpu.make_stream()), out(gpu.make_stream()), gpu_(gpu), generation_(fork_generation()) {}

  bool has_ended(Used& used) {
    return std::ranges::all_of(used.events,
                               [this](CudaEvent event) { return event == nullptr || gpu_.has_come(event); });
  }

  void sweep(Owners& ended) {
    for (size_t index = 0; index < used_.size();) {
      if (!has_ended(used_[index])) {
        ++index;
        continue;
      }
      Used used = std::move(used_[index]);
      used_.erase(used_.begin() + static_cast<ptrdiff_t>(index));
      for (const CudaEvent event : used.events)
        if (event != nullptr) gpu_.give_back(event);
      ended.push_back(std::move(used.owner));
      if (used.block == nullptr) continue;
      if (free_bytes_ + used.bytes > kMostFreeBytes) {
        unmap_registered(used.block, used.bytes);
        bytes_ -= used.bytes;
        continue;
      }
      free_[used.bytes].push_back(used.block);
      free_bytes_ += used.bytes;
    }
  }

  Gpu& gpu_;
  const uint64_t generation_;
  std::mutex mutex_;  // guards what follows
  std::vector<Used> used_;
  std::map<size_t, std::vector<void*>> free_;
  size_t free_bytes_ = 0;
  std::atomic<size_t> bytes_{0};
};

size_t staged_bytes(Gpu& gpu) {
  const OnGpu on_gpu(gpu);
  return StagingMemory::of(gpu).bytes();
}

StagedTask::StagedTask(Gpu& gpu, const std::vector<CudaStream>& streams, std::vector<DeviceSpan> inputs,
                       std::vector<DeviceSpan> outputs, std::shared_ptr<const void> owner)
    : gpu_(gpu),
      memory_([&]() -> StagingMemory& {
        const OnGpu on_gpu(gpu);
        return StagingMemory::of(gpu);
      }()),
      owner_(std::move(owner)) {
  // An array that is read and written has one place. An empty block has one of its own, too: places tell blocks apart.
  std::vector<DeviceSpan> spans;
  std::vector<size_t> places;
  size_t total = 0;
  const auto place_of = [&](const DeviceSpan& span) {
    const auto found = std::ranges::find(spans, span);
    if (found != spans.end()) return places[static_cast<size_t>(found - spans.begin())];
    spans.push_back(span);
    places.push_back(total);
    total += aligned(std::max(span.bytes, size_t{1}));
    return places.back();
  };
  for (const DeviceSpan& span : inputs) place_of(span);
  for (const DeviceSpan& span : outputs) place_of(span);
  block_bytes_ = std::bit_ceil(std::max(total, kSmallestBlock));
  const OnGpu on_gpu(gpu_);
  block_ = memory_.take(block_bytes_);
  const auto host_of = [&](const DeviceSpan& span) { return static_cast<std::byte*>(block_) + place_of(span); };
  try {
    for (const CudaStream stream : streams) {
      ready_.push_back(gpu_.record(stream));
      gpu_.let_wait(memory_.in, ready_.back());
      gpu_.let_wait(memory_.out, ready_.back());
    }
    for (const DeviceSpan& span : inputs) {
      inputs_.push_back(host_of(span));
      const bool is_first = std::ranges::find(inputs_, inputs_.back()) == std::prev(inputs_.end());
      if (span.bytes != 0 && is_first)
        gpu_.copy(memory_.in, reinterpret_cast<CudaAddress>(inputs_.back()), span.address, span.bytes);
    }
    for (const DeviceSpan& span : outputs) {
      outputs_.push_back(host_of(span));
      const bool is_first = std::ranges::find(outputs_, outputs_.back()) == std::prev(outputs_.end());
      if (span.bytes != 0 && is_first) written_.push_back({span, outputs_.back()});
    }
    copied_ = gpu_.record(memory_.in);
  } catch (const std::runtime_error&) {
    // Some copies may have been queued, and nothing tells when they end: the memory is never used again.
    static auto* const lost = new std::vector<std::shared_ptr<const void>>;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    lost->push_back(std::move(owner_));
    throw;
  }
}

StagedTask::~StagedTask() {
  if (memory_.was_forked()) return;
  std::vector<CudaEvent> events = std::move(ready_);
  events.push_back(copied_);
  events.push_back(back_.load());
  memory_.keep(block_, block_bytes_, std::move(events), std::move(owner_));
  try {
    const OnGpu on_gpu(gpu_);
    memory_.tidy();
  } catch (const std::runtime_error&) {  // of the GPU: then nothing is used again
  }
}

bool StagedTask::ready() {
  const OnGpu on_gpu(gpu_);
  return gpu_.has_come(copied_) && (!inner_ || inner_->ready());
}

void StagedTask::start(int root, uint64_t number) {
  if (!inner_) return copy_back();
  inner_state_ = State::kPending;
  inner_->start(root, number);
}

Task::State StagedTask::test(std::vector<int>& awaited) {
  if (inner_) inner_state_ = inner_->test(awaited);
  if (inner_state_ != State::kCompleted) return State::kPending;
  if (back_.load() == nullptr) copy_back();
  const OnGpu on_gpu(gpu_);
  if (!gpu_.has_come(back_.load())) return State::kQueued;
  inner_.reset();
  return State::kCompleted;
}

void StagedTask::copy_back() {
  if (finish_) finish_();
  const OnGpu on_gpu(gpu_);
  for (const Written& written : written_)
    gpu_.copy(memory_.out, written.span.address, reinterpret_cast<CudaAddress>(written.host), written.span.bytes);
  back_.store(gpu_.record(memory_.out));
}

void StagedTask::cancel() {
  if (inner_ && back_.load() == nullptr) inner_->cancel();
  if (inner_state_ == State::kCompleted) inner_.reset();
}

void StagedTask::let_wait(const std::vector<CudaStream>& streams) {
  const CudaEvent back = back_.load();
  if (back == nullptr) return;
  const OnGpu on_gpu(gpu_);
  for (const CudaStream stream : streams) gpu_.let_wait(stream, back);
}

}  // namespace procgroup
