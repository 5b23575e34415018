#include "collectives/network_call.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/block_counts.hpp"

namespace procgroup {
namespace {

// Purposes of the engine's own tags. Users' tags do not have the highest bit.
constexpr uint64_t kAgreementPurpose = 0;
constexpr uint64_t kDataPurpose = 1;
constexpr uint64_t kEngineTag = uint64_t{1} << 63;

// A reduction receives from all ranks at once: with many of them, in shorter segments, so that the scratch stays
// small, but not in such short ones that the messages are what costs.
constexpr size_t kReducedAtOnceBytes = size_t{1} << 20;
constexpr size_t kShortestSegmentBytes = 32 * 1024;

void copy_unless_same(void* to, const void* from, size_t bytes) {
  if (to != from && bytes != 0) std::memmove(to, from, bytes);
}

std::vector<size_t> counts(const std::vector<Block>& blocks) {
  std::vector<size_t> found;
  for (const Block& block : blocks) found.push_back(block.count);
  return found;
}

}  // namespace

NetworkState::NetworkState(Messages& through, GroupView members, NetworkLimits within)
    : messages(through), group(std::move(members)), limits(within) {}

// The agreement has one key for all calls of the group, so that ranks whose calls are out of step compare
// them instead of waiting for each other; data of different calls never meet.
MessageKey NetworkState::key(uint64_t purpose, uint64_t sequence) const {
  return {group.id, kEngineTag | (sequence << 2 & ~kEngineTag) | purpose};
}

Progress NetworkCall::advance() {
  if (is_completed()) return Progress::kDone;
  if (phase_ == Phase::kStart) start();
  const Progress progress = phase_ == Phase::kAgree ? advance_agreement() : run_->advance();
  if (is_completed()) return Progress::kDone;
  const Failure* failure = run_ ? run_->failure() : agreement_->failure();
  if (failure != nullptr) return fail_for(translated(*failure));
  return progress == Progress::kDone ? succeed() : progress;
}

void NetworkCall::start() {
  phase_ = Phase::kAgree;
  agreement_.emplace(state_.messages, state_.group, request_, state_.limits.small_bytes);
  agreement_->start(state_.key(kAgreementPurpose, 0));
}

Progress NetworkCall::advance_agreement() {
  if (!agreement_->is_completed()) return Progress::kWaiting;
  if (agreement_->failure() != nullptr) return Progress::kMoved;
  take_what_rode();
  if (everything_rides()) return Progress::kDone;
  start_run();
  return Progress::kMoved;
}

// all_to_all: whether all that this rank gives and gets has come with the records. Another rank may have more to do.
bool NetworkCall::everything_rides() const {
  if (state_.group.size() == 1) return true;
  if (call().op != OpKind::kAllToAll) return agreement_->rides(call().count);
  for (int peer = 0; peer < state_.group.size(); ++peer) {
    const size_t index = static_cast<size_t>(peer);
    const uint64_t larger = std::max(request_.inputs[index].count, request_.outputs[index].count);
    if (peer != rank() && !agreement_->rides(larger)) return false;
  }
  return true;
}

void NetworkCall::take_what_rode() {
  if (call().op == OpKind::kAllToAll) return take_blocks();
  if (!everything_rides()) return;
  const bool is_root = call().root == rank();
  const void* from = call().root < 0 || is_root ? block_for(request_, rank()) : agreement_->elements_of(call().root);
  switch (call().op) {
    case OpKind::kBroadcast:
    case OpKind::kScatter:
      return copy_unless_same(request_.output, from, call().bytes());
    case OpKind::kGather:
      if (is_root) take_blocks();
      return;
    case OpKind::kAllGather:
      return take_blocks();
    case OpKind::kReduce:
      if (is_root) reduce_all();
      return;
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
      return reduce_all();
    default:
      return;
  }
}

void NetworkCall::take_blocks() {
  for (int peer = 0; peer < state_.group.size(); ++peer) {
    const Block& output = request_.outputs[static_cast<size_t>(peer)];
    const size_t bytes = output.count * dtype_size(call().dtype);
    if (peer == rank()) {
      copy_unless_same(output.data, block_for(request_, peer), bytes);
    } else if (call().op != OpKind::kAllToAll || agreement_->rides(output.count)) {
      copy_unless_same(output.data, agreement_->elements_of(peer), bytes);
    }
  }
}

void NetworkCall::reduce_all() {
  std::vector<const void*> sources;
  for (int peer = 0; peer < state_.group.size(); ++peer) {
    sources.push_back(peer == rank() ? block_for(request_, peer) : agreement_->elements_of(peer));
  }
  const uint64_t count = block_count(request_, rank(), rank());
  if (count > 0) reduce(call().dtype, call().reduce_op, request_.output, sources.data(), state_.group.size(), count);
}

void NetworkCall::start_run() {
  phase_ = Phase::kRun;
  const size_t ranks = state_.group.members.size();
  size_t segment = state_.limits.segment_bytes;
  if (reduces(call().op)) segment = std::min(segment, std::max(kShortestSegmentBytes, kReducedAtOnceBytes / ranks));
  NetworkScheduleRequest wanted{.rank = rank(),
                                .size = state_.group.size(),
                                .segment_elements = std::max<size_t>(1, segment / dtype_size(call().dtype)),
                                .root = call().root,
                                .count = call().count,
                                .inputs = counts(request_.inputs),
                                .outputs = counts(request_.outputs)};
  if (call().op == OpKind::kAllToAll) {
    for (auto* sizes : {&wanted.inputs, &wanted.outputs}) {
      (*sizes)[static_cast<size_t>(rank())] = 0;  // what was taken before
      for (size_t& count : *sizes) count = agreement_->rides(count) ? 0 : count;
    }
  }
  run_.emplace(state_.messages, state_.group, request_, state_.key(kDataPurpose, call().sequence),
               schedule_network(call().op, wanted));
}

// The failure of a transfer has a world rank. And a message that its receive refused is none that a correct peer sends.
Failure NetworkCall::translated(Failure failure) const {
  if (failure.peer >= 0) failure.peer = state_.group.group_rank(failure.peer);
  if (failure.kind == Failure::Kind::kMismatch && failure.calls.empty()) {
    failure.kind = Failure::Kind::kFailed;
    failure.reason = "it sent what this call does not expect: " + failure.reason;
  }
  return failure;
}

Progress NetworkCall::succeed() {
  release();
  finish();
  return Progress::kDone;
}

Progress NetworkCall::fail_for(Failure failure) {
  failure.wrote = may_have_written();
  release();
  fail(std::move(failure));
  return Progress::kDone;
}

// `failure` comes from outside and has group ranks.
void NetworkCall::give_up(Failure failure) {
  if (!is_completed()) fail_for(std::move(failure));
}

// End all transfers: nobody touches the arrays, or this object's memory, afterwards.
void NetworkCall::release() {
  run_.reset();
  agreement_.reset();
}

std::vector<int> NetworkCall::missing() const {
  if (run_) return run_->missing();
  if (agreement_) return agreement_->missing();
  return {};
}

}  // namespace procgroup
