#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "transport/channel.hpp"

namespace procgroup {

Ring* Ring::initialise(void* address) {
  Ring* ring = new (address) Ring;
  ring->head.store(0, std::memory_order_relaxed);
  ring->tail.store(0, std::memory_order_relaxed);
  ring->closed.store(0, std::memory_order_release);
  return ring;
}

RingChannel::RingChannel(Ring* outgoing, Ring* incoming, size_t capacity, std::function<void()> announce)
    : outgoing_(outgoing),
      incoming_(incoming),
      capacity_(capacity),
      head_(outgoing->head.load(std::memory_order_relaxed)),
      tail_(incoming->tail.load(std::memory_order_relaxed)),
      seen_tail_(outgoing->tail.load(std::memory_order_relaxed)),
      announce_(std::move(announce)) {
  if (!std::has_single_bit(capacity)) throw std::invalid_argument("a ring's capacity must be a power of two");
}

RingChannel::~RingChannel() {
  // Release: whoever sees the flag also sees every byte published before it.
  outgoing_->closed.store(1, std::memory_order_release);
  announce_();
}

size_t RingChannel::used(uint64_t head, uint64_t tail) const {
  if (head - tail > capacity_) throw ChannelClosed{EPROTO};
  return static_cast<size_t>(head - tail);
}

// How much can be written; looks how far the consumer is when less than `wanted` seems to be free.
size_t RingChannel::room(size_t wanted) {
  if (incoming_->closed.load(std::memory_order_acquire) != 0) throw ChannelClosed{EPIPE};
  if (const size_t room = capacity_ - used(head_, seen_tail_); room >= wanted) return room;
  // Acquire pairs with the consumer's release of tail: its reads of the bytes that we are about to
  // overwrite have completed.
  const uint64_t tail = outgoing_->tail.load(std::memory_order_acquire);
  const size_t room = capacity_ - used(head_, tail);
  seen_tail_ = tail;
  return room;
}

size_t RingChannel::ready() const {
  // The flag is read before the head: a closed ring's last bytes are then never missed.
  const bool closed = incoming_->closed.load(std::memory_order_acquire) != 0;
  // Acquire pairs with the producer's release of head: the bytes up to it are visible.
  const size_t ready = used(incoming_->head.load(std::memory_order_acquire), tail_);
  if (ready == 0 && closed) throw ChannelClosed{0};
  return ready;
}

void RingChannel::put(uint64_t place, const void* data, size_t bytes) {
  if (bytes == 0) return;
  const size_t start = static_cast<size_t>(place) & (capacity_ - 1);
  const size_t first = std::min(bytes, capacity_ - start);
  std::memcpy(outgoing_->data() + start, data, first);
  if (first < bytes) std::memcpy(outgoing_->data(), static_cast<const std::byte*>(data) + first, bytes - first);
}

void RingChannel::get(uint64_t place, void* data, size_t bytes) const {
  if (bytes == 0) return;
  const size_t start = static_cast<size_t>(place) & (capacity_ - 1);
  const size_t first = std::min(bytes, capacity_ - start);
  std::memcpy(data, incoming_->data() + start, first);
  if (first < bytes) std::memcpy(static_cast<std::byte*>(data) + first, incoming_->data(), bytes - first);
}

void RingChannel::publish(size_t bytes) {
  head_ += bytes;
  outgoing_->head.store(head_, std::memory_order_release);  // publishes the bytes
  announce_();
}

// Only a producer that found the ring full waits for room. When less than half of it was seen filled here, that
// producer has published more since, and whoever reads that sees more than half, and announces it.
void RingChannel::hand_back(size_t bytes, size_t ready) {
  tail_ += bytes;
  incoming_->tail.store(tail_, std::memory_order_release);  // hands the room back
  if (ready >= capacity_ / 2) announce_();
}

size_t RingChannel::write_both(const void* data, size_t bytes, const void* next, size_t next_bytes) {
  const size_t moved = std::min(bytes + next_bytes, room(bytes + next_bytes));
  if (moved == 0) return 0;
  const size_t first = std::min(bytes, moved);
  put(head_, data, first);
  put(head_ + first, next, moved - first);
  publish(moved);
  return moved;
}

size_t RingChannel::read_both(void* data, size_t bytes, void* /*next*/, size_t /*next_bytes*/) {
  if (bytes == 0) return 0;
  const size_t there = ready();
  const size_t moved = std::min(bytes, there);
  if (moved == 0) return 0;
  get(tail_, data, moved);
  hand_back(moved, there);
  return moved;
}

bool RingChannel::write_whole(const void* head, size_t head_bytes, const void* rest, size_t rest_bytes) {
  if (room(head_bytes + rest_bytes) < head_bytes + rest_bytes) return false;
  put(head_, head, head_bytes);
  put(head_ + head_bytes, rest, rest_bytes);
  publish(head_bytes + rest_bytes);
  return true;
}

size_t RingChannel::peek(void* data, size_t bytes) {
  const size_t there = ready();
  if (there >= bytes) get(tail_, data, bytes);
  return there;
}

void RingChannel::take(size_t skipped, void* data, size_t bytes) {
  get(tail_ + skipped, data, bytes);
  hand_back(skipped + bytes, ready());
}

}  // namespace procgroup
