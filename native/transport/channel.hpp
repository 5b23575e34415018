// A channel: an ordered, reliable stream of bytes in both directions between this rank and one other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/file_descriptor.hpp"

namespace procgroup {

class Channel {
 public:
  virtual ~Channel() = default;

  // None of these waits. They return how many bytes were taken or given, 0 when nothing can move now, and
  // throw ChannelClosed when nothing will ever move again.
  size_t write_some(const void* data, size_t bytes) { return write_both(data, bytes, nullptr, 0); }
  size_t read_some(void* data, size_t bytes) { return read_both(data, bytes, nullptr, 0); }
  // Write one block, and the next one behind it: one system call, one packet.
  virtual size_t write_both(const void* data, size_t bytes, const void* next, size_t next_bytes) = 0;
  // Fill one block; a channel where each read costs a system call puts into the next one what comes behind.
  virtual size_t read_both(void* data, size_t bytes, void* next, size_t next_bytes) = 0;

  // A file descriptor to poll for more to read or write; -1 when the process's doorbell announces that.
  virtual int descriptor() const = 0;

  // Whether what was written would survive the end of this process: a socket that is closed while the other side still
  // writes is reset, and takes along what has not arrived there.
  virtual bool delivered() const { return true; }

  // Shortcuts of channels in memory, for a message that goes or comes whole; a socket has none. They throw as above.
  //
  // Write both blocks and publish them together; false, and nothing written, unless there is room for both.
  virtual bool write_whole(const void* /*head*/, size_t /*head_bytes*/, const void* /*rest*/, size_t /*rest_bytes*/) {
    return false;
  }
  // Copy the next bytes, which stay; how many bytes are there to read, and nothing is copied when that is fewer.
  virtual size_t peek(void* /*data*/, size_t /*bytes*/) { return 0; }
  // Let go of the next `skipped` bytes and read those behind them. That many must have been seen by peek().
  virtual void take(size_t /*skipped*/, void* /*data*/, size_t /*bytes*/) {}
};

struct ChannelClosed {
  int error_number;  // errno, or 0 when the other side closed in order
};

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

// A channel over a connected stream socket. The handshake has completed before: it carries only frames.
class TcpChannel : public Channel {
 public:
  // Takes the socket over and makes it non-blocking. `user_timeout_s` bounds how long written bytes may
  // stay unacknowledged, and an idle peer's host silent, before the connection counts as broken. Throws
  // std::system_error.
  explicit TcpChannel(FileDescriptor socket, double user_timeout_s = 30);
  ~TcpChannel() override;

  size_t write_both(const void* data, size_t bytes, const void* next, size_t next_bytes) override;
  size_t read_both(void* data, size_t bytes, void* next, size_t next_bytes) override;
  int descriptor() const override { return socket_.get(); }
  bool delivered() const override;

 private:
  FileDescriptor socket_;
  bool is_tcp_ = false;
};

}  // namespace procgroup
