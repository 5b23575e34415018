// The two kinds of transfer, as the rooms of Messages see them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/messages.hpp"

namespace procgroup {

inline Failure failed(int peer, std::string reason) {
  Failure failure{};
  failure.kind = Failure::Kind::kFailed;
  failure.peer = peer;
  failure.reason = std::move(reason);
  return failure;
}

inline Failure lost(int peer, std::string reason) {
  Failure failure = failed(peer, std::move(reason));
  failure.kind = Failure::Kind::kLost;
  return failure;
}

// Messages::pump moves all transfers, so advancing one only tells whether it is over. missing() gives world ranks.
class SendTransfer final : public Transfer {
 public:
  SendTransfer(int to, MessageKey under, const void* from, size_t count)
      : peer(to), key(under), data(static_cast<const std::byte*>(from)), size(count) {}

  Progress advance() override { return is_over() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override { return {peer}; }

  const int peer;
  const MessageKey key;
  const std::byte* const data;
  const size_t size;
  std::vector<std::byte> kept;  // what `data` points to, when nobody else keeps it
};

class ReceiveTransfer final : public Transfer {
 public:
  ReceiveTransfer(int from, MessageKey under, void* into, size_t room, const std::vector<int>* among)
      : peer(from), key(under), data(static_cast<std::byte*>(into)), capacity(room) {
    if (from == kAnySource && among != nullptr) sources = *among;
  }

  Progress advance() override { return is_over() ? Progress::kDone : Progress::kWaiting; }
  std::vector<int> missing() const override { return peer == kAnySource ? sources : std::vector<int>{peer}; }

  // Whether a message from this world rank may be received; no sources means every rank.
  bool accepts(int rank) const {
    if (peer != kAnySource) return peer == rank;
    return sources.empty() || std::find(sources.begin(), sources.end(), rank) != sources.end();
  }
  bool fits(uint64_t size) const { return takes_less ? size <= capacity : size == capacity; }
  void complete(size_t size) {
    bytes = size;
    finish();
  }
  void fail_size(int from, size_t size) {
    fail(failed(from, "the message has " + std::to_string(size) + " bytes, the receive has room for " +
                          std::to_string(capacity) + " bytes; send and receive must agree on the size"));
  }

  const int peer;
  const MessageKey key;
  std::byte* const data;
  const size_t capacity;
  std::vector<int> sources;
  bool takes_less = false;
};

inline void fail_unless_over(Transfer& transfer, const Failure& failure) {
  if (!transfer.is_over()) transfer.fail(failure);
}

}  // namespace procgroup
