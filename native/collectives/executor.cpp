#include "collectives/executor.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/clock.hpp"
#include "base/copy.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"
#include "dtype/partial.hpp"

namespace procgroup {
namespace {

// A result that goes to two places is made in blocks that stay in the first-level cache between the two.
constexpr size_t kSharedBlockBytes = 16 * 1024;
// Elements that the kernel reads are combined from the second-level cache.
constexpr size_t kScratchBytes = 128 * 1024;
// Bytes moved in one turn, so that deadlines, deaths and Ctrl-C are received in time.
constexpr size_t kTurnBytes = size_t{64} << 20;
// Transfers that run at once. Enough to keep every link busy; few enough to compare each step with all.
constexpr size_t kMostTransfers = 32;
// A process that is being killed cannot be read any more some time before its life word says that it ended.
constexpr int64_t kUnreadableWaitNs = 1'000'000'000;

}  // namespace

void Executor::copy_in() {
  const std::vector<Step>& steps = state_.schedule.steps;
  for (bool published = false; step_ < steps.size() && !published; ++step_) {
    const Step& step = steps[step_];
    published = step.kind == Step::Kind::kPublish;
    const bool copies_in = step.kind == Step::Kind::kCopy && step.to.kind == Place::Kind::kSlot;
    if (!published && !(copies_in && is_free(step.to.slot))) return;
    run(step);
  }
}

bool Executor::is_free(int slot) {
  const uint32_t bit = uint32_t{1} << slot;
  if ((state_.copied_in.before & bit) == 0) return true;
  for (int index = 0; index < state_.local_size(); ++index)
    if (state_.local(index).memory().finished.load(std::memory_order_acquire) + 1 < request_.descriptor.sequence)
      return false;
  state_.copied_in.before = 0;
  return true;
}

bool Executor::advance() {
  if (stalled_on_ >= 0) return stay_stalled();
  if (!running_.empty()) reap_transfers(true);
  const size_t before = step_;
  const bool completed = run_steps();
  // What these steps announced and answered is written together, before this rank waits for anything.
  if (step_ != before && !running_.empty()) reap_transfers(true);
  return completed;
}

// Whether all steps and their transfers have completed.
bool Executor::run_steps() {
  const std::vector<Step>& steps = state_.schedule.steps;
  for (size_t bytes = 0; !failure_ && step_ < steps.size() && bytes < kTurnBytes; ++step_) {
    const Step& step = steps[step_];
    if (!running_.empty() && must_wait(step)) return false;
    if (!run(step)) return false;
    bytes += step.bytes;
  }
  return !failure_ && step_ == steps.size() && running_.empty();
}

bool Executor::run(const Step& step) {
  switch (step.kind) {
    case Step::Kind::kCopy:
      run_copy(step);
      return true;
    case Step::Kind::kReduce:
      run_reduce(step);
      return true;
    case Step::Kind::kRead:
      return run_read(step);
    case Step::Kind::kReadReduce:
      return run_read_reduce(step);
    case Step::Kind::kPublish:
      state_.mine().memory().progress.store(state_.progress + step.value, std::memory_order_seq_cst);
      state_.wake_peers();
      return true;
    case Step::Kind::kAwait:
      if (step.rank != kEveryone) return reached(step.rank, step.value);
      while (next_ < state_.local_size() && reached(next_, step.value)) ++next_;
      if (next_ < state_.local_size()) return false;
      next_ = 0;
      return true;
    case Step::Kind::kSend:
    case Step::Kind::kReceive:
      return run_transfer(step);
  }
  return true;
}

CopyFunction Executor::copy_into(const Place& to) const {
  return state_.streams && to.kind == Place::Kind::kOutput ? copy_streaming : copy_cached;
}

void Executor::run_copy(const Step& step) {
  note_copy_in(step.to);
  std::byte* to = address(step.to);
  if (is_scattered(step.from)) {
    // The root of a broadcast has its iovecs only, no array.
    if (to != nullptr) copy_iovecs(to, request_.iovecs, step.from.offset, step.bytes, copy_into(step.to));
    return;
  }
  const std::byte* from = address(step.from);
  if (to != from) copy_into(step.to)(to, from, step.bytes);
}

void Executor::run_reduce(const Step& step) {
  const Descriptor& call = request_.descriptor;
  const size_t block = step.has_also ? kSharedBlockBytes : step.bytes;
  if (step.has_also) note_copy_in(step.also);
  for (size_t done = 0; done < step.bytes; done += block) {
    const size_t bytes = std::min(block, step.bytes - done);
    Place from = step.from;
    for (from.rank = 0; from.rank < step.sources; ++from.rank)
      state_.sources[static_cast<size_t>(from.rank)] = address(from.rank == step.own_source ? step.own : from) + done;
    std::byte* to = address(step.to) + done;
    reduce_sources(step, to, bytes / dtype_size(call.dtype));
    if (step.has_also) copy_cached(address(step.also) + done, to, bytes);
  }
}

void Executor::reduce_sources(const Step& step, void* to, size_t count) {
  const Descriptor& call = request_.descriptor;
  const void* const* sources = state_.sources.data();
  switch (step.stage) {
    case Stage::kWhole:
      return reduce(call.dtype, call.reduce_op, to, sources, step.sources, count);
    case Stage::kToPartial:
      return reduce_to_partial(call.dtype, call.reduce_op, to, sources, step.sources, count);
    case Stage::kFromPartial:
      return reduce_partials(call.dtype, call.reduce_op, to, sources, step.sources, count, state_.size());
  }
}

void Executor::note_copy_in(const Place& to) {
  if (to.kind == Place::Kind::kSlot) state_.copied_in.now |= uint32_t{1} << to.slot;
}

bool Executor::run_read(const Step& step) {
  return read(address(step.to), step.from, step.bytes, copy_into(step.to)) && counts(step.from.rank);
}

bool Executor::run_read_reduce(const Step& step) {
  const Descriptor& call = request_.descriptor;
  state_.scratch.resize(kScratchBytes * state_.members.size());
  for (size_t done = 0; done < step.bytes; done += kScratchBytes) {
    const size_t bytes = std::min(kScratchBytes, step.bytes - done);
    Place from = step.from;
    from.offset += done;
    for (from.rank = 0; from.rank < state_.size(); ++from.rank) {
      const void*& source = state_.sources[static_cast<size_t>(from.rank)];
      std::byte* scratch = state_.scratch.data() + kScratchBytes * static_cast<size_t>(from.rank);
      source = from.rank == state_.rank ? address(step.own) + done : mapped(from, bytes);
      if (source != nullptr) continue;
      if (!read(scratch, from, bytes, copy_cached)) return false;
      source = scratch;
    }
    reduce(call.dtype, call.reduce_op, address(step.to) + done, state_.sources.data(), state_.size(),
           bytes / dtype_size(call.dtype));
  }
  for (int rank = 0; rank < state_.size(); ++rank)
    if (rank != state_.rank && !counts(rank)) return false;
  return true;
}

bool Executor::reached(int index, uint64_t value) const {
  const GroupMemory& memory = state_.local(index).memory();
  return memory.progress.load(std::memory_order_seq_cst) >= state_.progress + value;
}

bool Executor::awaits(int rank) const {
  if (stalled_on_ >= 0) return rank == stalled_on_;
  if (std::ranges::any_of(running_, [rank](const Running& running) { return running.peer == rank; })) return true;
  if (step_ >= state_.schedule.steps.size() || !state_.topology.is_local(rank)) return false;
  const Step& step = state_.schedule.steps[step_];
  const int index = state_.topology.index_of(rank);
  return step.kind == Step::Kind::kAwait && (step.rank == kEveryone || step.rank == index) &&
         !reached(index, step.value);
}

uint64_t Executor::moved() const {
  uint64_t moved = done();
  for (const Running& running : running_) moved += running.transfer->moved();
  return moved;
}

bool Executor::run_transfer(const Step& step) {
  if (running_.size() >= kMostTransfers) reap_transfers(false);
  if (running_.size() >= kMostTransfers || failure_) return false;
  const GroupMessages& through = *state_.messages;
  const MessageKey key = through.data_key(request_.descriptor.sequence);
  const int world = through.group.world_rank(step.rank);
  const std::lock_guard lock(through.mutex);
  if (step.kind == Step::Kind::kReceive) {
    std::byte* to = address(step.to);
    running_.push_back({through.messages.receive(world, key, to, step.bytes), step.rank, {to, step.bytes}, true});
  } else if (is_scattered(step.from)) {  // nothing writes an input in several places
    running_.push_back(
        {through.messages.send(world, key, request_.iovecs, step.from.offset, step.bytes), step.rank, {}, false});
  } else {
    const std::byte* from = address(step.from);
    running_.push_back({through.messages.send(world, key, from, step.bytes), step.rank, {from, step.bytes}, false});
  }
  return true;
}

// Remove completed transfers; the first that failed ends the schedule.
void Executor::reap_transfers(bool pump) {
  const std::lock_guard lock(state_.messages->mutex);
  if (pump) state_.messages->pump();
  completed_transfers_ += std::erase_if(running_, [&](const Running& running) {
    if (!running.transfer->is_completed()) return false;
    const Failure* failure = running.transfer->failure();
    if (failure != nullptr && !failure_) {
      failure_ = std::make_unique<Failure>(state_.messages->group.by_group_rank(*failure));
    }
    return true;
  });
}

void Executor::cancel_transfers() {
  if (running_.empty()) return;
  const std::lock_guard lock(state_.messages->mutex);
  for (const Running& running : running_)
    if (!running.transfer->is_completed()) state_.messages->messages.cancel(*running.transfer, Aborted{});
  running_.clear();
}

// Whether a running transfer writes memory that the step touches, or reads memory that it writes.
bool Executor::must_wait(const Step& step) const {
  const auto overlap = [](const Memory& left, const Memory& right) {
    return left.begin < right.begin + right.bytes && right.begin < left.begin + left.bytes;
  };
  const Memory written = written_by(step);
  const std::array<Memory, 2> read = read_by(step);
  return std::ranges::any_of(running_, [&](const Running& running) {
    // Bytes that did not arrive must not be used: the other ranks would take them for the result.
    if (running.transfer->is_completed()) return running.transfer->failure() != nullptr;
    const bool reads = overlap(running.memory, read[0]) || overlap(running.memory, read[1]);
    return overlap(running.memory, written) || (running.writes && reads);
  });
}

Executor::Memory Executor::written_by(const Step& step) const {
  switch (step.kind) {
    case Step::Kind::kCopy:
    case Step::Kind::kReduce:
    case Step::Kind::kReceive:
      return {address(step.to), state_.schedule.written_bytes(step)};
    default:
      return {};
  }
}

// No transfer touches slots.
std::array<Executor::Memory, 2> Executor::read_by(const Step& step) const {
  const auto memory = [this](const Place& place, size_t bytes) {
    return is_scattered(place) || place.kind == Place::Kind::kSlot ? Memory{} : Memory{address(place), bytes};
  };
  switch (step.kind) {
    case Step::Kind::kCopy:
    case Step::Kind::kSend:
      return {memory(step.from, step.bytes), Memory{}};
    case Step::Kind::kReduce: {
      const size_t last = static_cast<size_t>(step.sources - 1) * state_.schedule.source_stride;
      const size_t bytes = state_.schedule.read_bytes(step);
      return {memory(step.from, last + bytes), memory(step.own, bytes)};
    }
    default:
      return {};
  }
}

bool Executor::is_scattered(const Place& place) const {
  return place.kind == Place::Kind::kInput && !request_.iovecs.empty();
}

std::byte* Executor::address(const Place& place) const {
  const auto index = static_cast<size_t>(place.rank);
  switch (place.kind) {
    case Place::Kind::kInput: {
      // Schedules only read inputs.
      void* base = request_.inputs.empty() ? const_cast<void*>(request_.input) : request_.inputs[index].data;
      return static_cast<std::byte*>(base) + place.offset;
    }
    case Place::Kind::kOutput: {
      void* base = request_.outputs.empty() ? request_.output : request_.outputs[index].data;
      return static_cast<std::byte*>(base) + place.offset;
    }
    case Place::Kind::kScratch:
      return state_.message_scratch.data() + index * state_.schedule.source_stride + place.offset;
    default:
      break;
  }
  return state_.local(place.rank).slot(request_.descriptor.sequence, place.slot) + place.offset;
}

// The memory that this rank reads of a peer: of several blocks, the block for this rank.
const BufferEntry& Executor::entry(const Place& place) const {
  const BufferTable table(state_.member(place.rank).small(request_.descriptor.sequence), state_.size());
  if (place.kind == Place::Kind::kPeerOutput) return table.output(0);
  return table.input(has_input_blocks(request_.descriptor.op) ? state_.rank : 0);
}

const std::byte* Executor::mapped(const Place& place, size_t bytes) const {
  return state_.peers[static_cast<size_t>(place.rank)]->mapped(entry(place).place, place.offset, bytes);
}

bool Executor::read(void* to, const Place& from, size_t bytes, CopyFunction copy) {
  const PeerMemory& peer = *state_.peers[static_cast<size_t>(from.rank)];
  if (peer.read(to, entry(from).place, from.offset, bytes, copy)) return true;
  stalled_on_ = from.rank;
  unreadable_since_ns_ = now_ns();
  return false;
}

// Other code finds peers that ended or gave up, and knows the reason; but a living peer that cannot be read must not
// stall this rank for ever.
bool Executor::stay_stalled() {
  const bool unreadable = unreadable_since_ns_ != 0 && now_ns() - unreadable_since_ns_ > kUnreadableWaitNs;
  if (unreadable && counts(stalled_on_) && state_.peers[static_cast<size_t>(stalled_on_)]->is_alive())
    failure_ = std::make_unique<Failure>(Failed{.peer = stalled_on_, .reason = "its array cannot be read any more"});
  return false;
}

bool Executor::counts(int rank) {
  if (is_exposed(state_, rank, request_.descriptor.sequence)) return true;
  stalled_on_ = rank;
  return false;
}

}  // namespace procgroup
