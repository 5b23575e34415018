// The first exchange of a collective over messages: everybody sends everybody a *record*, which is the
// descriptor of the call and, when that is little, what the sender has for the receiver.
//
//     +------------+----------------------------+- - - - - - - - - - - - - - - -+
//     | Descriptor | all_to_all: counts, 2 x p  | elements, at most small_bytes |
//     +------------+----------------------------+- - - - - - - - - - - - - - - -+
//
// The counts are those of the sender's input blocks, then of its output blocks, by rank. So every rank compares
// every pair, and all find the same first pair that differs.
//
// Nobody writes an output before all records are there, and all descriptors and pairs agree. Which elements ride
// in a record follows from the descriptor (all_to_all: from the counts), so ranks that agree on one agree on the
// other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/group_view.hpp"
#include "messages/messages.hpp"
#include "ops/request.hpp"

namespace procgroup {

class NetworkAgreement {
 public:
  // `small_bytes` is equal on all ranks. The request and the group outlive this.
  NetworkAgreement(Messages& messages, const GroupView& group, const Request& request, size_t small_bytes);
  ~NetworkAgreement();
  NetworkAgreement(const NetworkAgreement&) = delete;
  NetworkAgreement& operator=(const NetworkAgreement&) = delete;

  void start(MessageKey key);

  // Look at what has arrived; true when this is over: `failure()` says whether it went well.
  bool is_completed();
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }

  // Whether a block of that many elements, or without blocks the whole call, travels in the records.
  bool rides(uint64_t count) const { return count <= small_bytes_ / dtype_size(request_.descriptor.dtype); }
  // What that group rank, not ourselves, had for us.
  const void* elements_of(int rank) const { return record(rank) + head_bytes(); }
  std::vector<int> missing() const;
  // Those of them without whose record nothing happens on this rank: none while it has something else to do.
  std::vector<int> absent() const;

 private:
  size_t counts_bytes() const { return 2 * group_.members.size() * sizeof(uint64_t); }
  size_t head_bytes() const {
    return sizeof(Descriptor) + (request_.descriptor.op == OpKind::kAllToAll ? counts_bytes() : 0);
  }
  size_t stride() const { return sizeof(Descriptor) + counts_bytes() + small_bytes_; }
  std::byte* record(int rank) const { return records_.get() + static_cast<size_t>(rank) * stride(); }
  void write_head(std::byte* into) const;
  std::vector<std::byte> make_record(int to) const;
  uint64_t given(int from, int to) const;
  uint64_t expected(int from, int to) const;
  uint64_t count_at(int rank, size_t index) const;
  uint64_t riding(int from, int to) const;
  bool differs(int rank) const;
  void look_at(int rank);
  void compare_pairs();
  void report_mismatch();
  void cancel(const Failure& failure);

  Messages& messages_;
  const GroupView& group_;
  const Request& request_;
  const size_t small_bytes_;
  std::unique_ptr<std::byte[]> records_;             // by group rank
  std::vector<std::vector<std::byte>> outgoing_;     // by group rank
  std::vector<std::shared_ptr<Transfer>> sends_;     // by group rank; null at our own
  std::vector<std::shared_ptr<Transfer>> receives_;  // by group rank; null at our own
  std::vector<bool> seen_;
  int unseen_ = 0;
  int64_t mismatch_since_ns_ = 0;  // 0 while nobody is known to differ
  bool pairs_compared_ = false;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
