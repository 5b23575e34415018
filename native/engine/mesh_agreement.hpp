// The first exchange of a collective over messages: everybody sends everybody a *record*, which is the
// descriptor of the call and, when the call is small, the sender's elements behind it.
//
//     +------------+- - - - - - - - - - - - - - - -+
//     | Descriptor | elements, at most small_bytes |       to ranks that need no elements: the descriptor only
//     +------------+- - - - - - - - - - - - - - - -+
//
// Nobody writes an output before all records are there and all descriptors are equal. Whether a call is
// small follows from its descriptor, so ranks that agree on one agree on the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/group_view.hpp"
#include "engine/messages.hpp"
#include "transport/descriptor.hpp"

namespace procgroup {

class MeshAgreement {
 public:
  // `small_bytes` is equal on all ranks.
  MeshAgreement(Messages& messages, const GroupView& group, const Descriptor& call, size_t small_bytes);
  ~MeshAgreement();
  MeshAgreement(const MeshAgreement&) = delete;
  MeshAgreement& operator=(const MeshAgreement&) = delete;

  void start(MessageKey key, const void* input);

  // Look at what has arrived; true when this is over: `failure()` says whether it went well.
  bool is_over();
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }

  bool is_small() const { return call_.bytes() <= small_bytes_; }
  // The elements that this group rank sent; small calls only.
  const void* elements_of(int rank) const { return record(rank) + sizeof(Descriptor); }
  std::vector<int> missing() const;

 private:
  size_t stride() const { return sizeof(Descriptor) + small_bytes_; }
  std::byte* record(int rank) const { return records_.get() + static_cast<size_t>(rank) * stride(); }
  size_t record_bytes(int from, int to) const;
  Descriptor descriptor_of(int rank) const;
  bool differs(int rank) const;
  void look_at(int rank);
  void report_mismatch();
  void cancel(const Failure& failure);

  Messages& messages_;
  const GroupView& group_;
  const Descriptor& call_;
  const size_t small_bytes_;
  std::unique_ptr<std::byte[]> records_;             // by group rank
  std::vector<std::shared_ptr<Transfer>> sends_;     // by group rank; null at our own
  std::vector<std::shared_ptr<Transfer>> receives_;  // by group rank; null at our own
  std::vector<bool> seen_;
  int unseen_ = 0;
  int64_t mismatch_since_ns_ = 0;  // 0 while nobody is known to differ
  std::optional<Failure> failure_;
};

}  // namespace procgroup
