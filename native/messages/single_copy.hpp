// Single copy: the receiver reads a large message directly from the sender's buffer, in one copy instead of two.
//
// Vocabulary. Each rank has in its arena an *exposure table* for every other rank of its host. An entry is an
// *exposure*: it publishes the address of a message's buffer, which the receiver may then read. An exposure begins
// before the message is announced, and ends before the sender's user gets the buffer back: when the receiver has
// completed the read, has requested a stream instead or is lost, or when the send is cancelled.
//
// A reader may be stopped for any time between two of its steps. So it checks the exposure table after every read, and
// discards the data unless the exposure still lasts.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "base/processor.hpp"
#include "messages/transfer.hpp"
#include "transport/peer_memory.hpp"

namespace procgroup {

// Below this the ring is faster, where sender and receiver copy at the same time (Zen 3, 4 MiB: 0.3 ms against 0.4;
// 8 MiB: both 1.0; 16 MiB: 2.5 against 1.9. An Intel Xeon, 64 KiB: 9.6 us against 10.2; 256 KiB: 29.9 against 28.4;
// 4 MiB: 574 against 371).
inline size_t single_copy_bytes() { return has_fast_string_copies() ? size_t{256} << 10 : size_t{8} << 20; }
// Of a message behind others: then the other rank most often sends, too, and each rank has two copies to make on its
// own (an Intel Xeon, 64 messages of 64 KiB each way: 13 us a message, and 10.6 read; of 256 KiB: 44 and 24).
inline size_t single_copy_bytes_behind_others() {
  return has_fast_string_copies() ? size_t{64} << 10 : size_t{8} << 20;
}

// What one rank exposes to one other. Written by the exposer alone.
class ExposureTable {
 public:
  // Concurrent exposures, as many as programs have messages on the way. One for which no entry is free is streamed.
  static constexpr size_t kEntries = 64;

  // Reader: the address of the message; nothing when it is not exposed.
  std::optional<RemotePlace> find(uint64_t number) const;
  // Reader: whether the data that was read of the message until now is valid.
  bool exposes(uint64_t number) const;

 private:
  friend class Exposure;

  struct Entry {
    std::atomic<uint64_t> number;  // 0: no exposure
    std::atomic<RemotePlace> place;
  };
  static_assert(std::atomic<RemotePlace>::is_always_lock_free);

  const Entry& entry(uint64_t number) const { return entries_[number % kEntries]; }

  alignas(64) std::array<Entry, kEntries> entries_;
};

// One message exposed, until the end of this object.
class Exposure {
 public:
  Exposure() = default;
  // Exposes nothing when the entry for this number is in use.
  Exposure(ExposureTable& table, uint64_t number, RemotePlace place);
  Exposure(Exposure&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  Exposure& operator=(Exposure&&) = delete;
  ~Exposure() { end(); }

  bool lasts() const { return entry_ != nullptr; }
  void end();

 private:
  ExposureTable::Entry* entry_ = nullptr;
};

// What two ranks of one host need in order to expose messages to each other. All of it outlives their connection.
struct SingleCopy {
  ExposureTable* mine;          // what this rank exposes to the peer
  const ExposureTable* theirs;  // what the peer exposes to this rank
  const PeerMemory* peer;
  const Arena* own;
  size_t from = single_copy_bytes();
  size_t from_behind_others = std::min(from, single_copy_bytes_behind_others());

  Exposure expose(uint64_t number, const void* data, size_t bytes, bool is_behind_others) const;
};

// The receives that read what one peer exposes, in turn, a block at a time.
class SingleCopyReads {
 public:
  enum class Outcome {
    kBlock,  // read one block; more follow
    kCompleted,
    kUnreadable,  // the exposure has ended, or the memory cannot be read
  };
  struct Read {
    uint64_t number;
    std::shared_ptr<ReceiveTransfer> receive;
    uint64_t total;
    RemotePlace place;
    size_t done = 0;
  };

  bool empty() const { return reads_.empty(); }
  bool contains(uint64_t number) const;
  // Read this message; false when the peer does not expose it.
  bool begin(const SingleCopy& single_copy, uint64_t number, std::shared_ptr<ReceiveTransfer> receive, uint64_t total);
  // Read the next block; not when empty. A read that has ended is removed and returned in `ended`. Throws
  // std::out_of_range, and changes nothing, when the peer named a place outside of its arena.
  Outcome advance(const SingleCopy& single_copy, Read& ended);
  // Stop reading it; the receive that it was for.
  std::shared_ptr<ReceiveTransfer> remove(uint64_t number);
  // Stop reading into this receive; the message's number, or 0 when it is not read here.
  uint64_t remove(const ReceiveTransfer& receive);
  // Stop everything.
  void fail_all(const Failure& failure);

 private:
  std::deque<Read> reads_;
};

}  // namespace procgroup
