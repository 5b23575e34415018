#include "engine/mesh_agreement.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/clock.hpp"
#include "engine/transfer.hpp"

namespace procgroup {
namespace {

static_assert(std::has_unique_object_representations_v<Descriptor>, "descriptors are sent and compared as bytes");

// When some ranks are known to disagree, how long to wait for the rest before saying so without them.
constexpr int64_t kMismatchPatienceNs = 1'000'000'000;

bool needs_elements(const Descriptor& call, int from, int to) {
  switch (call.op) {
    case OpKind::kBroadcast:
      return from == call.root;
    case OpKind::kReduce:
      return to == call.root;
    case OpKind::kAllReduce:
    case OpKind::kAllGather:
      return true;
    default:
      return false;
  }
}

}  // namespace

MeshAgreement::MeshAgreement(Messages& messages, const GroupView& group, const Descriptor& call, size_t small_bytes)
    : messages_(messages),
      group_(group),
      call_(call),
      small_bytes_(small_bytes),
      records_(std::make_unique_for_overwrite<std::byte[]>(stride() * group.members.size())),
      sends_(group.members.size()),
      receives_(group.members.size()),
      seen_(group.members.size(), false) {}

MeshAgreement::~MeshAgreement() {
  Failure aborted{};
  aborted.kind = Failure::Kind::kAborted;
  cancel(aborted);
}

size_t MeshAgreement::record_bytes(int from, int to) const {
  return sizeof(Descriptor) + (is_small() && needs_elements(call_, from, to) ? call_.bytes() : 0);
}

void MeshAgreement::start(MessageKey key, const void* input) {
  std::byte* mine = record(group_.rank);
  std::memcpy(mine, &call_, sizeof call_);
  bool somebody_needs_elements = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    somebody_needs_elements = somebody_needs_elements || record_bytes(group_.rank, peer) > sizeof(Descriptor);
  }
  if (somebody_needs_elements) std::memcpy(mine + sizeof(Descriptor), input, call_.bytes());
  seen_[static_cast<size_t>(group_.rank)] = true;
  unseen_ = group_.size() - 1;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank) continue;
    const int world = group_.world_rank(peer);
    receives_[static_cast<size_t>(peer)] = messages_.receive_up_to(world, key, record(peer), stride());
    sends_[static_cast<size_t>(peer)] = messages_.send(world, key, mine, record_bytes(group_.rank, peer));
  }
}

bool MeshAgreement::is_over() {
  if (failure_) return true;
  for (int rank = 0; rank < group_.size() && !failure_; ++rank) {
    if (!seen_[static_cast<size_t>(rank)] && receives_[static_cast<size_t>(rank)]->is_over()) look_at(rank);
  }
  if (failure_) return true;
  if (mismatch_since_ns_ != 0) {
    if (unseen_ > 0 && now_ns() - mismatch_since_ns_ < kMismatchPatienceNs) return false;
    report_mismatch();
    return true;
  }
  return unseen_ == 0 &&
         std::all_of(sends_.begin(), sends_.end(), [](const auto& send) { return !send || send->is_over(); });
}

void MeshAgreement::look_at(int rank) {
  const Transfer& receive = *receives_[static_cast<size_t>(rank)];
  if (receive.failure() != nullptr) {
    failure_ = *receive.failure();
    return;
  }
  seen_[static_cast<size_t>(rank)] = true;
  --unseen_;
  if (receive.bytes < sizeof(Descriptor)) {
    failure_ = failed(group_.world_rank(rank), "it sent a record that is too short");
  } else if (differs(rank)) {
    if (mismatch_since_ns_ == 0) mismatch_since_ns_ = now_ns();
  } else if (receive.bytes != record_bytes(rank, group_.rank)) {
    failure_ =
        failed(group_.world_rank(rank), "it sent " + std::to_string(receive.bytes) + " bytes with its call, expected " +
                                            std::to_string(record_bytes(rank, group_.rank)));
  }
}

Descriptor MeshAgreement::descriptor_of(int rank) const {
  Descriptor call;
  std::memcpy(&call, record(rank), sizeof call);
  return call;
}

bool MeshAgreement::differs(int rank) const { return std::memcmp(record(rank), &call_, sizeof call_) != 0; }

void MeshAgreement::report_mismatch() {
  failure_.emplace();
  failure_->kind = Failure::Kind::kMismatch;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const bool seen = seen_[static_cast<size_t>(rank)];
    failure_->calls.push_back(seen ? descriptor_of(rank).describe() : "nothing yet");
  }
}

std::vector<int> MeshAgreement::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto& receive = receives_[static_cast<size_t>(rank)];
    if (receive && !receive->is_over()) ranks.push_back(rank);
  }
  return ranks;
}

void MeshAgreement::cancel(const Failure& failure) {
  for (const auto& transfers : {sends_, receives_}) {
    for (const auto& transfer : transfers) {
      if (transfer && !transfer->is_over()) messages_.cancel(*transfer, failure);
    }
  }
}

}  // namespace procgroup
