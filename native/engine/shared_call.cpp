#include "engine/shared_call.hpp"

#include <cstring>

#include "base/clock.hpp"
#include "transport/arena.hpp"

namespace procgroup {
namespace {

// When some ranks are known to disagree, how long to wait for the rest before saying so without them.
constexpr int64_t kMismatchPatienceNs = 1'000'000'000;

// A result that goes to two places is made in blocks that stay in the first-level cache between the two.
constexpr size_t kSharedBlockBytes = 16 * 1024;

// Whether this call moves its data beside its announcement.
bool is_small(const Descriptor& call, const GroupLayout& layout) { return call.bytes() <= layout.small_bytes; }

bool contributes(const Descriptor& call, int rank) {
  if (call.op == OpKind::kBarrier) return false;
  return call.op != OpKind::kBroadcast || rank == call.root;
}

void copy_unless_same(void* to, const void* from, size_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void SharedState::wake_peers() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank) continue;
    const Arena& arena = *(*arenas)[static_cast<size_t>(peer)];
    // Pairs with the sleeper's increment, which comes before its last look at our flags: either it sees the
    // flag that was written before this load, or this load sees it asleep.
    if (arena.header().sleepers.load(std::memory_order_seq_cst) != 0) arena.wake();
  }
}

SharedCall::SharedCall(SharedState& state, const Request& request)
    : state_(state), request_(request), fingerprint_(request.descriptor.fingerprint()) {}

Progress SharedCall::advance() {
  switch (phase_) {
    case Phase::kAnnounce:
      announce();
      phase_ = Phase::kAgree;
      [[fallthrough]];
    case Phase::kAgree:
      if (!agree()) return Progress::kWaiting;
      if (is_over()) return Progress::kDone;
      if (is_small(request_.descriptor, state_.layout)) {
        finish_small();
        finish();
        return Progress::kDone;
      }
      plan();
      phase_ = Phase::kExecute;
      next_ = 0;
      [[fallthrough]];
    case Phase::kExecute: {
      const size_t before = step_;
      if (!execute()) return step_ == before ? Progress::kWaiting : Progress::kMoved;
      state_.progress += state_.plan.published;
      state_.chunks += state_.plan.chunks;
      finish();
    }
  }
  return Progress::kDone;
}

void SharedCall::announce() {
  const Descriptor& call = request_.descriptor;
  GroupMemoryView& mine = state_.mine();
  CallLine& line = mine.line(call.sequence);
  if (is_small(call, state_.layout) && contributes(call, state_.rank) && call.count != 0)
    std::memcpy(mine.payload(call.sequence, call.bytes()), request_.input, call.bytes());
  mine.descriptor(call.sequence) = call;
  line.fingerprint = fingerprint_;
  line.sequence.store(call.sequence, std::memory_order_seq_cst);
  state_.wake_peers();
}

bool SharedCall::agree() {
  const uint64_t sequence = request_.descriptor.sequence;
  for (; next_ < state_.size(); ++next_) {
    const CallLine& line = state_.members[static_cast<size_t>(next_)].line(sequence);
    if (line.sequence.load(std::memory_order_seq_cst) != sequence) break;
    if (line.fingerprint != fingerprint_) mismatch_ = true;
  }
  if (!mismatch_) return next_ == state_.size();
  if (mismatch_since_ns_ == 0) mismatch_since_ns_ = now_ns();
  if (next_ < state_.size() && now_ns() - mismatch_since_ns_ < kMismatchPatienceNs) return false;
  report_mismatch();
  return true;
}

void SharedCall::report_mismatch() {
  Failure failure{.kind = Failure::Kind::kMismatch};
  const uint64_t sequence = request_.descriptor.sequence;
  for (const GroupMemoryView& member : state_.members) {
    const bool arrived = member.line(sequence).sequence.load(std::memory_order_seq_cst) == sequence;
    failure.calls.push_back(arrived ? member.descriptor(sequence).describe() : "nothing yet");
  }
  fail(std::move(failure));
}

void SharedCall::finish_small() {
  const Descriptor& call = request_.descriptor;
  const size_t bytes = call.bytes();
  const auto payload = [&](int rank) {
    return state_.members[static_cast<size_t>(rank)].payload(call.sequence, bytes);
  };
  switch (call.op) {
    case OpKind::kBroadcast:
      if (state_.rank != call.root) copy_unless_same(request_.output, payload(call.root), bytes);
      break;
    case OpKind::kReduce:
      if (state_.rank != call.root) break;
      [[fallthrough]];
    case OpKind::kAllReduce:
      for (int rank = 0; rank < state_.size(); ++rank) state_.sources[static_cast<size_t>(rank)] = payload(rank);
      reduce(call.dtype, call.reduce_op, request_.output, state_.sources.data(), state_.size(), call.count);
      break;
    case OpKind::kAllGather:
      for (int rank = 0; rank < state_.size(); ++rank)
        copy_unless_same(request_.outputs[static_cast<size_t>(rank)], payload(rank), bytes);
      break;
    default:
      break;
  }
}

void SharedCall::plan() {
  const Descriptor& call = request_.descriptor;
  const SlotPlanRequest wanted{.rank = state_.rank,
                               .size = state_.size(),
                               .bytes = call.bytes(),
                               .element_bytes = dtype_size(call.dtype),
                               .chunk_bytes = state_.layout.chunk_bytes,
                               .root = call.root,
                               .earlier_chunks = state_.chunks};
  switch (call.op) {
    case OpKind::kAllReduce:
      plan_all_reduce(wanted);
      break;
    case OpKind::kBroadcast:
      plan_broadcast(wanted, state_.plan);
      break;
    case OpKind::kReduce:
      plan_reduce(wanted, state_.plan);
      break;
    case OpKind::kAllGather:
      plan_all_gather(wanted, state_.plan);
      break;
    default:
      state_.plan.clear();
  }
}

void SharedCall::plan_all_reduce(SlotPlanRequest wanted) {
  if (state_.size() == 2 && wanted.bytes >= state_.exchanged_bytes) {
    wanted.chunk_bytes = 2 * state_.layout.slot_bytes;
    plan_all_reduce_exchanged(wanted, state_.plan);
  } else if (state_.size() == 2 || wanted.bytes <= state_.direct_bytes) {
    plan_all_reduce_direct(wanted, state_.plan);
  } else {
    plan_all_reduce_scattered(wanted, state_.plan);
  }
}

bool SharedCall::execute() {
  const std::vector<Step>& steps = state_.plan.steps;
  while (step_ < steps.size() && run(steps[step_])) ++step_;
  return step_ == steps.size();
}

bool SharedCall::run(const Step& step) {
  switch (step.kind) {
    case Step::Kind::kCopy:
      copy_unless_same(address(step.to), address(step.from), step.bytes);
      return true;
    case Step::Kind::kReduce:
      run_reduce(step);
      return true;
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

void SharedCall::run_reduce(const Step& step) {
  const Dtype dtype = request_.descriptor.dtype;
  const size_t block = step.has_also ? kSharedBlockBytes : step.bytes;
  for (size_t done = 0; done < step.bytes; done += block) {
    const size_t bytes = std::min(block, step.bytes - done);
    Place from = step.from;
    for (from.rank = 0; from.rank < state_.size(); ++from.rank)
      state_.sources[static_cast<size_t>(from.rank)] = address(from.rank == state_.rank ? step.own : from) + done;
    std::byte* to = address(step.to) + done;
    reduce(dtype, request_.descriptor.reduce_op, to, state_.sources.data(), state_.size(), bytes / dtype_size(dtype));
    if (step.has_also) std::memcpy(address(step.also) + done, to, bytes);
  }
}

bool SharedCall::reached(int rank, uint64_t value) const {
  const GroupMemory& memory = state_.members[static_cast<size_t>(rank)].memory();
  return memory.progress.load(std::memory_order_seq_cst) >= state_.progress + value;
}

std::byte* SharedCall::address(const Place& place) const {
  switch (place.kind) {
    case Place::Kind::kInput:
      // Plans only read inputs.
      return static_cast<std::byte*>(const_cast<void*>(request_.input)) + place.offset;
    case Place::Kind::kOutput: {
      void* base = request_.outputs.empty() ? request_.output : request_.outputs[static_cast<size_t>(place.rank)];
      return static_cast<std::byte*>(base) + place.offset;
    }
    case Place::Kind::kSlot:
      break;
  }
  return state_.members[static_cast<size_t>(place.rank)].slot(place.slot) + place.offset;
}

std::vector<int> SharedCall::missing() const {
  std::vector<int> ranks;
  const uint64_t sequence = request_.descriptor.sequence;
  for (int rank = 0; rank < state_.size(); ++rank) {
    if (phase_ != Phase::kExecute) {
      const CallLine& line = state_.members[static_cast<size_t>(rank)].line(sequence);
      if (line.sequence.load(std::memory_order_seq_cst) != sequence) ranks.push_back(rank);
    } else if (step_ < state_.plan.steps.size()) {
      const Step& step = state_.plan.steps[step_];
      if (step.kind == Step::Kind::kAwait && (step.rank == kEveryone || step.rank == rank) &&
          !reached(rank, step.value))
        ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace procgroup
