// The two kinds of transfer, as the parts of Messages see them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/iovec.hpp"
#include "messages/messages.hpp"

namespace procgroup {

// A text for error messages: "5 float64". The type may come from a peer, and be invalid.
inline std::string elements(uint64_t bytes, ElementType type) {
  if (type == kUntyped || type > kDtypes) return std::to_string(bytes) + " bytes";
  const Dtype dtype = static_cast<Dtype>(type - 1);
  return std::to_string(bytes / dtype_size(dtype)) + " " + dtype_name(dtype);
}

// Messages::pump moves all transfers, so advancing one only returns whether it has completed. missing() gives world
// ranks.
class SendTransfer final : public Transfer {
 public:
  SendTransfer(int to, MessageKey under, const void* from, size_t count)
      : peer(to), key(under), data(static_cast<const std::byte*>(from)), size(count) {}
  SendTransfer(int to, MessageKey under, std::span<const Iovec> from, size_t offset, size_t count)
      : peer(to), key(under), data(nullptr), size(count), iovecs_(from), offset_(offset) {}

  Progress advance() override { return is_completed() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override { return {peer}; }

  // A scatter-gather list has no `data`.
  bool is_scattered() const { return !iovecs_.empty(); }
  // The bytes from `first` on, as far as they are contiguous.
  std::span<const std::byte> run(size_t first) const {
    if (!is_scattered()) return {data + first, size - first};
    const std::span<const std::byte> found = contiguous_run(iovecs_, offset_ + first);
    return found.first(std::min(found.size(), size - first));
  }
  void copy(std::byte* to, size_t first, size_t count) const {
    if (is_scattered())
      copy_iovecs(to, iovecs_, offset_ + first, count, copy_cached);
    else if (count > 0)
      std::memcpy(to, data + first, count);
  }

  const int peer;
  const MessageKey key;
  const std::byte* const data;
  const size_t size;
  ElementType type = kUntyped;
  std::vector<std::byte> kept;  // the bytes of `data`, when this transfer owns them

 private:
  const std::span<const Iovec> iovecs_;
  const size_t offset_ = 0;
};

class ReceiveTransfer final : public Transfer {
 public:
  ReceiveTransfer(int from, MessageKey under, void* into, size_t limit, const std::vector<int>* among)
      : peer(from), key(under), data(static_cast<std::byte*>(into)), capacity(limit) {
    if (from == kAnySource && among != nullptr) sources = *among;
  }

  Progress advance() override { return is_completed() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override { return peer == kAnySource ? sources : std::vector<int>{peer}; }

  // Whether a message from this world rank may be received; no sources means every rank.
  bool accepts(int rank) const {
    if (peer != kAnySource) return peer == rank;
    return sources.empty() || std::find(sources.begin(), sources.end(), rank) != sources.end();
  }
  bool fits(uint64_t size, ElementType of) const {
    return of == type && (takes_less ? size <= capacity : size == capacity);
  }
  void complete(size_t size) {
    bytes = size;
    finish();
  }
  void refuse(int from, uint64_t size, ElementType of) {
    fail(Mismatch{.reason = "send of " + elements(size, of), .peer = from});
  }

  const int peer;
  const MessageKey key;
  std::byte* const data;
  const size_t capacity;
  std::vector<int> sources;
  ElementType type = kUntyped;
  bool takes_less = false;
};

inline void fail_unless_completed(Transfer& transfer, const Failure& failure) {
  if (!transfer.is_completed()) transfer.fail(failure);
}

}  // namespace procgroup
