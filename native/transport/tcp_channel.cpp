#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "transport/channel.hpp"

namespace procgroup {
namespace {

constexpr unsigned kProbeSeconds = 5;  // of silence before the first probe, and between probes

void make_non_blocking(int socket) {
  const int flags = fcntl(socket, F_GETFL);
  if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a connection non-blocking");
  }
}

bool is_tcp(int socket) {
  int protocol = 0;
  socklen_t size = sizeof protocol;
  return getsockopt(socket, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 && protocol == IPPROTO_TCP;
}

void set_option(int socket, int level, int option, unsigned value) {
  if (setsockopt(socket, level, option, &value, sizeof value) < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot set an option of a TCP connection");
  }
}

msghdr message_of(std::array<iovec, 2>& blocks) {
  msghdr message{};
  message.msg_iov = blocks.data();
  message.msg_iovlen = blocks.size();
  return message;
}

// What a failed send or recv means: nothing now, or nothing ever again.
size_t nothing_moved() {
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw ChannelClosed{errno};
}

}  // namespace

TcpChannel::TcpChannel(FileDescriptor socket, double user_timeout_s) : socket_(std::move(socket)) {
  make_non_blocking(socket_.get());
  is_tcp_ = is_tcp(socket_.get());
  if (!is_tcp_) return;  // a Unix socket has neither option and needs neither
  set_option(socket_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<unsigned>(user_timeout_s * 1000));
  // A rank that only waits writes nothing: probes notice for it that the other host is gone.
  set_option(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, kProbeSeconds);
  set_option(socket_.get(), IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
}

TcpChannel::~TcpChannel() {
  if (!socket_) return;
  ::shutdown(socket_.get(), SHUT_WR);
  // Closing a socket that holds unread bytes sends a reset, which would throw away what we wrote
  // last; so the unread bytes are taken first. The bound keeps a flooding peer from holding us here.
  char discarded[16 * 1024];
  for (int round = 0; round < 256 && ::recv(socket_.get(), discarded, sizeof discarded, MSG_DONTWAIT) > 0; ++round) {
  }
}

bool TcpChannel::delivered() const {
  int unacknowledged = 0;
  return !is_tcp_ || ::ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
}

size_t TcpChannel::write_both(const void* data, size_t bytes, const void* next, size_t next_bytes) {
  if (bytes + next_bytes == 0) return 0;
  std::array<iovec, 2> blocks = {iovec{const_cast<void*>(data), bytes}, {const_cast<void*>(next), next_bytes}};
  const msghdr message = message_of(blocks);
  const ssize_t moved = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return moved < 0 ? nothing_moved() : static_cast<size_t>(moved);
}

size_t TcpChannel::read_both(void* data, size_t bytes, void* next, size_t next_bytes) {
  if (bytes + next_bytes == 0) return 0;
  std::array<iovec, 2> blocks = {iovec{data, bytes}, {next, next_bytes}};
  msghdr message = message_of(blocks);
  const ssize_t moved = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  if (moved == 0) throw ChannelClosed{0};
  return moved < 0 ? nothing_moved() : static_cast<size_t>(moved);
}

}  // namespace procgroup
