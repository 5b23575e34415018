#include "collectives/shared_executor.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "base/copy.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"

namespace procgroup {
namespace {

// A result that goes to two places is made in blocks that stay in the first-level cache between the two.
constexpr size_t kSharedBlockBytes = 16 * 1024;
// What the kernel reads is combined from the second-level cache.
constexpr size_t kScratchBytes = 128 * 1024;
// What is moved in one turn, so that deadlines, deaths and Ctrl-C are received in time.
constexpr size_t kTurnBytes = size_t{64} << 20;
// A process that is being killed cannot be read any more some time before its life word says that it ended.
constexpr int64_t kUnreadableWaitNs = 1'000'000'000;

}  // namespace

void SharedExecutor::copy_in() {
  const std::vector<Step>& steps = state_.schedule.steps;
  for (bool published = false; step_ < steps.size() && !published; ++step_) {
    const Step& step = steps[step_];
    published = step.kind == Step::Kind::kPublish;
    const bool deposits = step.kind == Step::Kind::kCopy && step.to.kind == Place::Kind::kSlot;
    if (!published && !(deposits && is_free(step.to.slot))) return;
    run(step);
  }
}

bool SharedExecutor::is_free(int slot) {
  const uint32_t bit = uint32_t{1} << slot;
  if ((state_.copied_in.before & bit) == 0) return true;
  for (const GroupMemoryView& member : state_.members)
    if (member.memory().finished.load(std::memory_order_acquire) + 1 < request_.descriptor.sequence) return false;
  state_.copied_in.before = 0;
  return true;
}

bool SharedExecutor::advance() {
  if (stalled_on_ >= 0) return stay_stalled();
  const std::vector<Step>& steps = state_.schedule.steps;
  for (size_t bytes = 0; step_ < steps.size() && bytes < kTurnBytes; ++step_) {
    if (!run(steps[step_])) return false;
    bytes += steps[step_].bytes;
  }
  return step_ == steps.size();
}

bool SharedExecutor::run(const Step& step) {
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
      while (next_ < state_.size() && reached(next_, step.value)) ++next_;
      if (next_ < state_.size()) return false;
      next_ = 0;
      return true;
  }
  return true;
}

CopyFunction SharedExecutor::copy_into(const Place& to) const {
  return state_.streams && to.kind == Place::Kind::kOutput ? copy_streaming : copy_cached;
}

void SharedExecutor::run_copy(const Step& step) {
  note_copy_in(step.to);
  std::byte* to = address(step.to);
  if (step.from.kind == Place::Kind::kInput && !request_.iovecs.empty())
    return copy_iovecs(to, request_.iovecs, step.from.offset, step.bytes, copy_into(step.to));
  const std::byte* from = address(step.from);
  if (to != from) copy_into(step.to)(to, from, step.bytes);
}

void SharedExecutor::run_reduce(const Step& step) {
  const Dtype dtype = request_.descriptor.dtype;
  const size_t block = step.has_also ? kSharedBlockBytes : step.bytes;
  if (step.has_also) note_copy_in(step.also);
  for (size_t done = 0; done < step.bytes; done += block) {
    const size_t bytes = std::min(block, step.bytes - done);
    Place from = step.from;
    for (from.rank = 0; from.rank < state_.size(); ++from.rank)
      state_.sources[static_cast<size_t>(from.rank)] = address(from.rank == state_.rank ? step.own : from) + done;
    std::byte* to = address(step.to) + done;
    reduce(dtype, request_.descriptor.reduce_op, to, state_.sources.data(), state_.size(), bytes / dtype_size(dtype));
    if (step.has_also) copy_cached(address(step.also) + done, to, bytes);
  }
}

void SharedExecutor::note_copy_in(const Place& to) {
  if (to.kind == Place::Kind::kSlot) state_.copied_in.now |= uint32_t{1} << to.slot;
}

bool SharedExecutor::run_read(const Step& step) {
  return read(address(step.to), step.from, step.bytes, copy_into(step.to)) && counts(step.from.rank);
}

bool SharedExecutor::run_read_reduce(const Step& step) {
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

bool SharedExecutor::reached(int rank, uint64_t value) const {
  const GroupMemory& memory = state_.member(rank).memory();
  return memory.progress.load(std::memory_order_seq_cst) >= state_.progress + value;
}

bool SharedExecutor::awaits(int rank) const {
  if (stalled_on_ >= 0) return rank == stalled_on_;
  if (step_ >= state_.schedule.steps.size()) return false;
  const Step& step = state_.schedule.steps[step_];
  return step.kind == Step::Kind::kAwait && (step.rank == kEveryone || step.rank == rank) && !reached(rank, step.value);
}

std::byte* SharedExecutor::address(const Place& place) const {
  const auto block = static_cast<size_t>(place.rank);
  switch (place.kind) {
    case Place::Kind::kInput: {
      // Schedules only read inputs.
      void* base = request_.inputs.empty() ? const_cast<void*>(request_.input) : request_.inputs[block].data;
      return static_cast<std::byte*>(base) + place.offset;
    }
    case Place::Kind::kOutput: {
      void* base = request_.outputs.empty() ? request_.output : request_.outputs[block].data;
      return static_cast<std::byte*>(base) + place.offset;
    }
    default:
      break;
  }
  return state_.member(place.rank).slot(request_.descriptor.sequence, place.slot) + place.offset;
}

// What this rank reads of a peer: of blocks, the one that is for this rank.
const BufferEntry& SharedExecutor::entry(const Place& place) const {
  const BufferTable sheet(state_.member(place.rank).small(request_.descriptor.sequence), state_.size());
  if (place.kind == Place::Kind::kPeerOutput) return sheet.output(0);
  return sheet.input(has_input_blocks(request_.descriptor.op) ? state_.rank : 0);
}

const std::byte* SharedExecutor::mapped(const Place& place, size_t bytes) const {
  return state_.peers[static_cast<size_t>(place.rank)]->mapped(entry(place).place, place.offset, bytes);
}

bool SharedExecutor::read(void* to, const Place& from, size_t bytes, CopyFunction copy) {
  const PeerMemory& peer = *state_.peers[static_cast<size_t>(from.rank)];
  if (peer.read(to, entry(from).place, from.offset, bytes, copy)) return true;
  stalled_on_ = from.rank;
  unreadable_since_ns_ = now_ns();
  return false;
}

// Who ended or gave up is for others to find, who know why; but a living peer that cannot be read must not stall this
// rank for ever.
bool SharedExecutor::stay_stalled() {
  const bool unreadable = unreadable_since_ns_ != 0 && now_ns() - unreadable_since_ns_ > kUnreadableWaitNs;
  if (unreadable && counts(stalled_on_) && state_.peers[static_cast<size_t>(stalled_on_)]->is_alive())
    failure_ =
        Failure{.kind = Failure::Kind::kFailed, .peer = stalled_on_, .reason = "its array cannot be read any more"};
  return false;
}

bool SharedExecutor::counts(int rank) {
  if (is_exposed(state_, rank, request_.descriptor.sequence)) return true;
  stalled_on_ = rank;
  return false;
}

}  // namespace procgroup
