#include "transport/ring_channel.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

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

size_t RingChannel::write_some(const void* data, size_t bytes) {
  if (incoming_->closed.load(std::memory_order_acquire) != 0) throw ChannelClosed{EPIPE};
  // Acquire pairs with the consumer's release of tail: its reads of the bytes that we are about to
  // overwrite are over.
  const size_t room = capacity_ - used(head_, outgoing_->tail.load(std::memory_order_acquire));
  const size_t moved = std::min(bytes, room);
  if (moved == 0) return 0;
  const size_t start = static_cast<size_t>(head_) & (capacity_ - 1);
  const size_t first = std::min(moved, capacity_ - start);
  std::memcpy(outgoing_->data() + start, data, first);
  std::memcpy(outgoing_->data(), static_cast<const std::byte*>(data) + first, moved - first);
  head_ += moved;
  outgoing_->head.store(head_, std::memory_order_release);  // publishes the bytes
  announce_();
  return moved;
}

size_t RingChannel::read_some(void* data, size_t bytes) {
  if (bytes == 0) return 0;
  // The flag is read before the head: a closed ring's last bytes are then never missed.
  const bool closed = incoming_->closed.load(std::memory_order_acquire) != 0;
  // Acquire pairs with the producer's release of head: the bytes up to it are visible.
  const size_t ready = used(incoming_->head.load(std::memory_order_acquire), tail_);
  if (ready == 0 && closed) throw ChannelClosed{0};
  const size_t moved = std::min(bytes, ready);
  if (moved == 0) return 0;
  const size_t start = static_cast<size_t>(tail_) & (capacity_ - 1);
  const size_t first = std::min(moved, capacity_ - start);
  std::memcpy(data, incoming_->data() + start, first);
  std::memcpy(static_cast<std::byte*>(data) + first, incoming_->data(), moved - first);
  tail_ += moved;
  incoming_->tail.store(tail_, std::memory_order_release);  // hands the room back
  announce_();
  return moved;
}

}  // namespace procgroup
