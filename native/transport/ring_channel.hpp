// A channel over two byte rings in shared memory, one for each direction.
//
//              producer's mapping                          Vocabulary. The *head* counts all bytes ever
//   +--------+--------+--------+-----------------+         produced, the *tail* all bytes ever consumed;
//   |  head  |  tail  | closed | bytes[capacity] |         both only grow, and byte number n is stored
//   +--------+--------+--------+-----------------+         at bytes[n % capacity]. One thread of one
//     producer consumer producer                           process produces, one of another consumes.
//
// Nothing that the other side wrote is trusted: each side keeps its own counter privately and the
// capacity outside the ring, and takes a foreign counter only when 0 <= head - tail <= capacity.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "transport/channel.hpp"

namespace procgroup {

struct Ring {
  static constexpr size_t kLine = 64;

  alignas(kLine) std::atomic<uint64_t> head;
  alignas(kLine) std::atomic<uint64_t> tail;
  alignas(kLine) std::atomic<uint32_t> closed;

  // Bytes of memory that a ring takes; it begins at an address that is a multiple of kLine.
  static size_t bytes(size_t capacity) { return sizeof(Ring) + capacity; }
  // Lay an empty, open ring there. The producer calls it before the consumer learns of the address.
  static Ring* initialise(void* address);

  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

class RingChannel : public Channel {
 public:
  // `outgoing` is produced here and consumed there, `incoming` the other way round; both outlive this
  // channel. `capacity`, of either ring, is a power of two (else std::invalid_argument). `announce` is
  // called after bytes were published or consumed: it rings the other process's doorbell.
  RingChannel(Ring* outgoing, Ring* incoming, size_t capacity, std::function<void()> announce);
  ~RingChannel() override;

  size_t write_both(const void* data, size_t bytes, const void* next, size_t next_bytes) override;
  size_t read_both(void* data, size_t bytes, void* next, size_t next_bytes) override;
  int descriptor() const override { return -1; }
  bool write_whole(const void* head, size_t head_bytes, const void* rest, size_t rest_bytes) override;
  size_t peek(void* data, size_t bytes) override;
  void take(size_t skipped, void* data, size_t bytes) override;

 private:
  size_t used(uint64_t head, uint64_t tail) const;
  size_t room(size_t wanted);
  size_t ready() const;
  void put(uint64_t place, const void* data, size_t bytes);
  void get(uint64_t place, void* data, size_t bytes) const;
  void publish(size_t bytes);
  void hand_back(size_t bytes, size_t ready);

  Ring* outgoing_;
  Ring* incoming_;
  size_t capacity_;
  uint64_t head_;  // of outgoing_: ours alone to write
  uint64_t tail_;  // of incoming_: ours alone to write
  // Of outgoing_, as last seen: to look again takes a cache line from the consumer.
  uint64_t seen_tail_;
  std::function<void()> announce_;
};

}  // namespace procgroup
