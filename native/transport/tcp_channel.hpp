// A channel over a connected stream socket. The handshake has completed before: it carries only frames.
#pragma once

#include "base/file_descriptor.hpp"
#include "transport/channel.hpp"

namespace procgroup {

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
