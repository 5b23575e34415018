#include "collectives/network_agreement.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/clock.hpp"
#include "collectives/block_counts.hpp"
#include "collectives/pair_counts.hpp"
#include "messages/transfer.hpp"

namespace procgroup {
namespace {

static_assert(std::has_unique_object_representations_v<Descriptor>, "descriptors are sent and compared as bytes");

// When some ranks are known to disagree, how long to wait for the rest before saying so without them.
constexpr int64_t kMismatchWaitNs = 1'000'000'000;

}  // namespace

NetworkAgreement::NetworkAgreement(Messages& messages, const GroupView& group, const Request& request,
                                   size_t small_bytes)
    : messages_(messages),
      group_(group),
      request_(request),
      small_bytes_(small_bytes),
      records_(std::make_unique_for_overwrite<std::byte[]>(stride() * group.members.size())),
      outgoing_(group.members.size()),
      sends_(group.members.size()),
      receives_(group.members.size()),
      seen_(group.members.size(), false) {}

NetworkAgreement::~NetworkAgreement() {
  Failure aborted{};
  aborted.kind = Failure::Kind::kAborted;
  cancel(aborted);
}

void NetworkAgreement::write_head(std::byte* into) const {
  std::memcpy(into, &request_.descriptor, sizeof(Descriptor));
  if (request_.descriptor.op != OpKind::kAllToAll) return;
  into += sizeof(Descriptor);
  for (const auto* blocks : {&request_.inputs, &request_.outputs}) {
    for (const Block& block : *blocks) {
      const uint64_t count = block.count;
      std::memcpy(into, &count, sizeof count);
      into += sizeof count;
    }
  }
}

std::vector<std::byte> NetworkAgreement::make_record(int to) const {
  const size_t bytes = riding(group_.rank, to) * dtype_size(request_.descriptor.dtype);
  std::vector<std::byte> made(head_bytes() + bytes);
  write_head(made.data());
  if (bytes > 0) std::memcpy(made.data() + head_bytes(), block_for(request_, to), bytes);
  return made;
}

// all_to_all: entry `index` of the counts in that rank's record.
uint64_t NetworkAgreement::count_at(int rank, size_t index) const {
  uint64_t count = 0;
  std::memcpy(&count, record(rank) + sizeof(Descriptor) + index * sizeof count, sizeof count);
  return count;
}
uint64_t NetworkAgreement::given(int from, int to) const { return count_at(from, static_cast<size_t>(to)); }
uint64_t NetworkAgreement::expected(int from, int to) const {
  return count_at(to, group_.members.size() + static_cast<size_t>(from));
}

// Elements in the record from one rank to another.
uint64_t NetworkAgreement::riding(int from, int to) const {
  const bool by_pair = request_.descriptor.op == OpKind::kAllToAll;
  const uint64_t count = by_pair ? given(from, to) : block_count(request_, from, to);
  return rides(by_pair ? count : request_.descriptor.count) ? count : 0;
}

void NetworkAgreement::start(MessageKey key) {
  write_head(record(group_.rank));
  seen_[static_cast<size_t>(group_.rank)] = true;
  unseen_ = group_.size() - 1;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank) continue;
    const int world = group_.world_rank(peer);
    std::vector<std::byte>& mine = outgoing_[static_cast<size_t>(peer)] = make_record(peer);
    receives_[static_cast<size_t>(peer)] = messages_.receive_up_to(world, key, record(peer), stride());
    sends_[static_cast<size_t>(peer)] = messages_.send(world, key, mine.data(), mine.size());
  }
}

bool NetworkAgreement::is_completed() {
  if (failure_) return true;
  for (int rank = 0; rank < group_.size() && !failure_; ++rank) {
    if (!seen_[static_cast<size_t>(rank)] && receives_[static_cast<size_t>(rank)]->is_completed()) look_at(rank);
  }
  if (failure_) return true;
  if (mismatch_since_ns_ != 0) {
    if (unseen_ > 0 && now_ns() - mismatch_since_ns_ < kMismatchWaitNs) return false;
    report_mismatch();
    return true;
  }
  if (unseen_ > 0) return false;
  if (!pairs_compared_) compare_pairs();
  return failure_ || std::ranges::all_of(sends_, [](const auto& send) { return !send || send->is_completed(); });
}

void NetworkAgreement::look_at(int rank) {
  const Transfer& receive = *receives_[static_cast<size_t>(rank)];
  if (receive.failure() != nullptr) {
    failure_ = *receive.failure();
    return;
  }
  seen_[static_cast<size_t>(rank)] = true;
  --unseen_;
  if (receive.bytes < sizeof(Descriptor)) {
    failure_ = failed(group_.world_rank(rank), "it sent a record that is too short");
    return;
  }
  if (differs(rank)) {
    if (mismatch_since_ns_ == 0) mismatch_since_ns_ = now_ns();
    return;
  }
  const bool has_counts = receive.bytes >= head_bytes();
  const size_t bytes =
      head_bytes() + (has_counts ? riding(rank, group_.rank) : 0) * dtype_size(request_.descriptor.dtype);
  if (receive.bytes == bytes) return;
  failure_ = failed(group_.world_rank(rank), "it sent " + std::to_string(receive.bytes) +
                                                 " bytes with its call, expected " + std::to_string(bytes));
}

void NetworkAgreement::compare_pairs() {
  pairs_compared_ = true;
  if (request_.descriptor.op != OpKind::kAllToAll) return;
  PairCounts counts;
  failure_ = counts.read(
      request_.descriptor, group_.size(), [&](int from, int to) { return given(from, to); },
      [&](int from, int to) { return expected(from, to); }, &group_.global_ranks);
  if (failure_ && failure_->peer >= 0) failure_->peer = group_.world_rank(failure_->peer);
}

bool NetworkAgreement::differs(int rank) const {
  return std::memcmp(record(rank), &request_.descriptor, sizeof(Descriptor)) != 0;
}

void NetworkAgreement::report_mismatch() {
  failure_.emplace();
  failure_->kind = Failure::Kind::kMismatch;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const bool seen = seen_[static_cast<size_t>(rank)];
    failure_->calls.push_back(seen ? Descriptor::copied_from(record(rank)).describe(&group_.global_ranks)
                                   : "nothing yet");
  }
}

std::vector<int> NetworkAgreement::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto& receive = receives_[static_cast<size_t>(rank)];
    if (receive && !receive->is_completed()) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> NetworkAgreement::absent() const {
  const bool sent = std::ranges::all_of(sends_, [](const auto& send) { return !send || send->is_completed(); });
  return sent && mismatch_since_ns_ == 0 && !failure_ ? missing() : std::vector<int>{};
}

void NetworkAgreement::cancel(const Failure& failure) {
  for (const auto& transfers : {sends_, receives_}) {
    for (const auto& transfer : transfers) {
      if (transfer && !transfer->is_completed()) messages_.cancel(*transfer, failure);
    }
  }
}

}  // namespace procgroup
