#include "engine/mesh_call.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "dtype/dtype.hpp"
#include "dtype/partial.hpp"
#include "engine/transfer.hpp"

namespace procgroup {
namespace {

// Purposes of the engine's own tags. Users' tags do not have the highest bit.
constexpr uint64_t kAgreementPurpose = 0;
constexpr uint64_t kDataPurpose = 1;
constexpr uint64_t kNoticePurpose = 2;
constexpr uint64_t kEngineTag = uint64_t{1} << 63;

// What other ranks are told about a failure of ours.
std::string told_to_others(const Failure& failure) {
  switch (failure.kind) {
    case Failure::Kind::kTimeout:
      return "its call timed out";
    case Failure::Kind::kInterrupted:
      return "its call was interrupted";
    case Failure::Kind::kAborted:
      return "it gave the call up";
    default:
      return failure.reason;
  }
}

RingPlan plan_for(const Descriptor& call, const RingRequest& request) {
  switch (call.op) {
    case OpKind::kReduce:
      return plan_ring_reduce(request);
    case OpKind::kAllGather:
      return plan_ring_all_gather(request);
    case OpKind::kBroadcast:
      return plan_chain_broadcast(request);
    default:
      return plan_ring_all_reduce(request);
  }
}

}  // namespace

MeshCall::MeshCall(Messages& messages, GroupView group, const Descriptor& call, const void* input, void* output,
                   std::vector<void*> outputs, MeshLimits limits)
    : messages_(messages),
      group_(std::move(group)),
      call_(call),
      input_(input),
      outputs_(std::move(outputs)),
      limits_(limits) {
  if (call_.op != OpKind::kAllGather) outputs_ = {output};
}

MeshCall::~MeshCall() { release(); }

// The agreement has one key for all calls of the group, so that ranks whose calls are out of step compare
// them instead of waiting for each other; data of different calls never meet.
MessageKey MeshCall::key(uint64_t purpose) const {
  const uint64_t sequence = purpose == kAgreementPurpose ? 0 : call_.sequence;
  return {group_.id, kEngineTag | (sequence << 2 & ~kEngineTag) | purpose};
}

Progress MeshCall::advance() {
  if (is_over()) return Progress::kDone;
  if (phase_ == Phase::kStart) start();
  if (phase_ == Phase::kAgree) {
    if (agreement_->is_over()) {
      if (agreement_->failure() != nullptr) return end_with(*agreement_->failure());
      if (agreement_->is_small() || group_.size() == 1) return finish_small();
      start_run();
      return Progress::kMoved;
    }
    return heard_notice() ? Progress::kDone : Progress::kWaiting;
  }
  const Progress progress = run_->advance();
  if (run_->failure() != nullptr) return heard_notice() ? Progress::kDone : end_with(*run_->failure());
  if (progress == Progress::kWaiting && heard_notice()) return Progress::kDone;
  if (progress != Progress::kDone) return progress;
  release();
  finish();
  return Progress::kDone;
}

void MeshCall::start() {
  phase_ = Phase::kAgree;
  std::vector<int> others = group_.members;
  std::erase(others, group_.world_rank(group_.rank));
  if (!others.empty()) {
    notice_receive_ = messages_.receive_up_to(kAnySource, key(kNoticePurpose), &notice_, sizeof notice_, &others);
  }
  agreement_.emplace(messages_, group_, call_, limits_.small_bytes);
  agreement_->start(key(kAgreementPurpose), input_);
}

Progress MeshCall::finish_small() {
  const size_t bytes = static_cast<size_t>(call_.bytes());
  const auto copy = [&](void* to, int from_rank) {
    const void* from = from_rank == group_.rank ? input_ : agreement_->elements_of(from_rank);
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  };
  if (call_.op == OpKind::kBroadcast) copy(outputs_[0], call_.root);
  if (call_.op == OpKind::kAllGather) {
    for (int rank = 0; rank < group_.size(); ++rank) copy(outputs_[static_cast<size_t>(rank)], rank);
  }
  const bool reduces = call_.op == OpKind::kAllReduce || (call_.op == OpKind::kReduce && call_.root == group_.rank);
  if (reduces) reduce_small();
  release();
  finish();
  return Progress::kDone;
}

void MeshCall::reduce_small() {
  std::vector<const void*> sources;
  for (int rank = 0; rank < group_.size(); ++rank) {
    sources.push_back(rank == group_.rank ? input_ : agreement_->elements_of(rank));
  }
  if (call_.count > 0) {
    reduce(call_.dtype, call_.reduce_op, outputs_[0], sources.data(), group_.size(), call_.count);
  }
}

void MeshCall::start_run() {
  phase_ = Phase::kRun;
  const size_t widest = std::max(dtype_size(call_.dtype), dtype_size(partial_dtype(call_.dtype, call_.reduce_op)));
  const RingRequest request{.rank = group_.rank,
                            .size = group_.size(),
                            .count = static_cast<size_t>(call_.count),
                            .segment_elements = std::max<size_t>(1, limits_.segment_bytes / widest),
                            .root = call_.root};
  run_.emplace(messages_, group_, call_, key(kDataPurpose), plan_for(call_, request), input_, outputs_);
}

// Whether another rank's notice ended this call.
bool MeshCall::heard_notice() {
  if (!notice_receive_ || !notice_receive_->is_over() || notice_receive_->failure() != nullptr) return false;
  Failure failure = failed(notice_receive_->source, "");
  if (notice_receive_->bytes == sizeof notice_) {
    failure.reason.assign(notice_.reason, strnlen(notice_.reason, sizeof notice_.reason));
    const bool names_another = notice_.peer >= 0 && notice_.peer < group_.size() && notice_.peer != group_.rank;
    if (notice_.kind == Failure::Kind::kLost && names_another) {
      failure.kind = Failure::Kind::kLost;
      failure.peer = group_.world_rank(notice_.peer);
      failure.pid = notice_.pid;
    }
  }
  release();
  fail(in_group_ranks(std::move(failure)));
  return true;
}

void MeshCall::notify(const Failure& failure) {
  if (failure.kind == Failure::Kind::kMismatch || phase_ == Phase::kStart) return;
  Notice notice{};
  notice.kind = failure.kind;
  notice.peer = failure.peer;
  notice.pid = failure.pid;
  const std::string reason = told_to_others(failure);
  std::memcpy(notice.reason, reason.data(), std::min(reason.size(), sizeof notice.reason));
  const auto* bytes = reinterpret_cast<const std::byte*>(&notice);
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank) continue;
    messages_.post(group_.world_rank(peer), key(kNoticePurpose), std::vector<std::byte>(bytes, bytes + sizeof notice));
  }
}

Progress MeshCall::end_with(Failure failure) {
  failure = in_group_ranks(std::move(failure));
  notify(failure);
  release();
  fail(std::move(failure));
  return Progress::kDone;
}

// `failure` comes from outside and has group ranks.
void MeshCall::give_up(Failure failure) {
  if (is_over()) return;
  notify(failure);
  release();
  fail(std::move(failure));
}

// End all transfers: nobody touches the arrays, or this object's memory, afterwards.
void MeshCall::release() {
  run_.reset();
  agreement_.reset();
  if (notice_receive_ && !notice_receive_->is_over()) {
    Failure aborted{};
    aborted.kind = Failure::Kind::kAborted;
    messages_.cancel(*notice_receive_, std::move(aborted));
  }
}

std::vector<int> MeshCall::missing() const {
  if (run_) return run_->missing();
  if (agreement_) return agreement_->missing();
  return {};
}

Failure MeshCall::in_group_ranks(Failure failure) const {
  if (failure.peer >= 0) failure.peer = group_.group_rank(failure.peer);
  return failure;
}

}  // namespace procgroup
