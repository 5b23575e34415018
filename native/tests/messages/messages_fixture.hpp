// Shared by the tests of messages: two ranks in one thread, and a rank beside a hostile peer.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "messages/frame.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {

using Bytes = std::vector<unsigned char>;
using TransferPtr = std::shared_ptr<Transfer>;

inline constexpr size_t kMiB = 1024 * 1024;

inline Bytes pattern(size_t bytes, unsigned seed) {
  Bytes data(bytes);
  for (size_t index = 0; index < bytes; ++index)
    data[index] = static_cast<unsigned char>((index * 7 + seed * 131) >> 2);
  return data;
}

inline bool succeeded(const TransferPtr& transfer) {
  return transfer->is_completed() && transfer->failure() == nullptr;
}

template <class Kind>
bool failed_as(const TransferPtr& transfer) {
  return transfer->is_completed() && transfer->failure() != nullptr && transfer->failure()->is<Kind>();
}

// Two ranks in one thread: the test decides the order of events.
struct Pair {
  explicit Pair(LinkKind kind = LinkKind::kUnixSocket) {
    ChannelPair ends = links.connect(kind, 0, 1);
    first.attach(1, std::move(ends.first));
    second.attach(0, std::move(ends.second));
  }
  void settle() {
    while (int{first.pump()} + int{second.pump()} > 0) {
    }
  }
  Links links{2};
  Messages first{0, 2};
  Messages second{1, 2};
};

// Rank 0 of two, beside a raw channel on which the test writes the bytes of a hostile or dying peer.
struct Victim {
  Victim() {
    ChannelPair ends = links.connect(LinkKind::kUnixSocket, 0, 1);
    messages.attach(1, std::move(ends.first));
    raw = std::move(ends.second);
    ChannelPair honest = links.connect(LinkKind::kUnixSocket, 0, 2);
    messages.attach(2, std::move(honest.first));
    friendly.attach(0, std::move(honest.second));
  }
  void write(const void* data, size_t bytes) {
    const auto* at = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const size_t moved = raw->write_some(at, bytes);
      at += moved;
      bytes -= moved;
      messages.pump();
    }
  }
  void write(const FrameHeader& header) { write(&header, sizeof header); }
  void settle() {
    while (messages.pump()) {
    }
  }
  void check_that_rank_2_is_unharmed() {
    uint64_t sent = 42;
    uint64_t received = 0;
    auto send = friendly.send(0, {9, 9}, &sent, sizeof sent);
    auto receive = messages.receive(2, {9, 9}, &received, sizeof received);
    while (!receive->is_completed()) {
      friendly.pump();
      messages.pump();
    }
    CHECK(succeeded(send) && succeeded(receive) && received == 42);
  }
  Links links{3};
  Messages messages{0, 3};
  Messages friendly{2, 3};
  std::unique_ptr<Channel> raw;
};

inline const Failure kCancelled = Timeout{.seconds = 1.5};

}  // namespace procgroup::testing
