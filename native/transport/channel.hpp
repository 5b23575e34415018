// A channel: an ordered, reliable stream of bytes in both directions between this rank and one other.
#pragma once

#include <cstddef>

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

}  // namespace procgroup
