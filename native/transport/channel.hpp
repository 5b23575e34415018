// A channel: an ordered, reliable stream of bytes in both directions between this rank and one other.
#pragma once

#include <cstddef>

namespace procgroup {

class Channel {
 public:
  virtual ~Channel() = default;

  // Neither waits. Both return how many bytes were taken or given, 0 when nothing can move now, and
  // throw ChannelClosed when nothing will ever move again.
  virtual size_t write_some(const void* data, size_t bytes) = 0;
  virtual size_t read_some(void* data, size_t bytes) = 0;

  // A file descriptor to poll for more to read or write; -1 when the process's doorbell announces that.
  virtual int descriptor() const = 0;
};

struct ChannelClosed {
  int error_number;  // errno, or 0 when the other side closed in order
};

}  // namespace procgroup
