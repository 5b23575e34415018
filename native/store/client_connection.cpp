#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <string>
#include <system_error>

#include "base/log.hpp"
#include "store/client.hpp"

namespace procgroup::store {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSliceNs = 100 * kMillisecond;     // between two calls of `check`
constexpr int64_t kSilenceNs = 1000 * kMillisecond;  // how long to wait for an address once another has refused
constexpr int64_t kLongestPauseNs = 200 * kMillisecond;
constexpr double kCancelSeconds = 0.3;
constexpr double kAnswerSeconds = 0.8;
constexpr size_t kCopyBytes = 64 * 1024;  // larger tails are sent in place
// A server that closes this many connections during the handshake is not a store that is being restarted.
constexpr int kSilentCloses = 3;

const Check kNoCheck = [] {};

// The deadline passed in the middle of a message, or before it.
struct DeadlinePassed {};

std::string error_text(int number) { return std::generic_category().message(number); }

void set_option(int socket, int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); }

// Waits in slices; returns whether the event came before the deadline.
bool wait_for(pollfd* events, size_t count, Deadline deadline, const Check& check) {
  while (true) {
    const int64_t left = deadline.remaining_ns(kSliceNs);
    const timespec slice{left / 1'000'000'000, left % 1'000'000'000};
    const int ready = ppoll(events, count, &slice, nullptr);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "poll");
    check();
    if (deadline.passed()) return false;
  }
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first) freeaddrinfo(first);
  }
};

// Start connecting to one numeric address. Returns no descriptor, and sets errno, when that fails at once.
FileDescriptor start_connecting(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  AddressList list;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list.first) != 0) {
    errno = EINVAL;
    return {};
  }
  FileDescriptor socket(::socket(list.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  const int outcome = connect(socket.get(), list.first->ai_addr, list.first->ai_addrlen);
  if (outcome != 0 && errno != EINPROGRESS) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

int outcome_of(const FileDescriptor& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error;
}

// Whether the socket is connected to itself. That can happen when connecting to a free port of the range from which
// the kernel chooses the ports of clients.
bool is_self_connected(const FileDescriptor& socket) {
  sockaddr_storage mine{}, theirs{};
  socklen_t size = sizeof mine, other = sizeof theirs;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&mine), &size) != 0) return false;
  if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&theirs), &other) != 0) return false;
  return size == other && std::memcmp(&mine, &theirs, size) == 0;
}

// Connect to all addresses at once and return the first connection. Returns no descriptor, and sets `error`, when all
// fail. Once an address has refused, the others have kSilenceNs left: the next attempt tries all of them again.
FileDescriptor connect_any(const Client::Options& options, Deadline deadline, const Check& check, std::string& error) {
  const auto hurry = [&] { deadline.at_ns = std::min(deadline.at_ns, now_ns() + kSilenceNs); };
  std::vector<FileDescriptor> sockets;
  for (const std::string& address : options.addresses) {
    FileDescriptor socket = start_connecting(address, options.port);
    if (socket) {
      sockets.push_back(std::move(socket));
    } else {
      error = error_text(errno);
      hurry();
    }
  }
  while (!sockets.empty()) {
    std::vector<pollfd> events;
    for (const FileDescriptor& socket : sockets) events.push_back({socket.get(), POLLOUT, 0});
    if (!wait_for(events.data(), events.size(), deadline, check)) {
      error = "no answer";
      return {};
    }
    for (size_t i = sockets.size(); i-- > 0;) {
      if (events[i].revents == 0) continue;
      const int number = outcome_of(sockets[i]);
      if (number == 0 && !is_self_connected(sockets[i])) return std::move(sockets[i]);
      error = error_text(number == 0 ? ECONNREFUSED : number);
      hurry();
      sockets.erase(sockets.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return {};
}

void configure(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  const timeval slice{0, kSliceNs / 1000};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice);
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
}

void pause(int64_t nanoseconds, Deadline deadline, const Check& check) {
  const Deadline end{std::min(now_ns() + nanoseconds, deadline.at_ns)};
  wait_for(nullptr, 0, end, check);
}

// Warn once for each address that a server accepts connections and does not reply; a busy store may reply later.
void warn_silent(const Client::Options& options) {
  static std::set<std::pair<std::string, int>> warned;
  {
    const std::lock_guard lock(fork_mutex());
    if (!warned.emplace(options.addresses.front(), options.port).second) return;
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f", kAnswerSeconds);
  log_line(LogLevel::kWarning, "port " + std::to_string(options.port) + " of " + options.addresses.front() +
                                   " accepts connections but has not answered for " + seconds +
                                   " s; is it a procgroup store?");
}

ConnectFailure refusal(const Welcome& welcome) {
  using Kind = ConnectFailure::Kind;
  switch (static_cast<Admission>(welcome.admission)) {
    case Admission::kOtherJob:
      return {Kind::kOtherJob, job_of(welcome.job)};
    case Admission::kKeyNeeded:
      return {Kind::kKeyNeeded, job_of(welcome.job)};
    case Admission::kFull:
      return {Kind::kFull, std::to_string(kMaxConnections)};
    case Admission::kWrongKey:
      return {Kind::kWrongKey, job_of(welcome.job)};
    default:
      return {Kind::kOtherVersion, std::to_string(welcome.version)};
  }
}

}  // namespace

std::unique_ptr<ClientConnection> ClientConnection::open(const Client::Options& options, uint64_t client,
                                                         Deadline deadline, const Check& check) {
  std::string error = "no address";
  int silent_closes = 0;
  for (int64_t next_pause = 10 * kMillisecond;; next_pause = std::min(next_pause * 2, kLongestPauseNs)) {
    FileDescriptor socket = connect_any(options, deadline, check, error);
    if (socket) {
      configure(socket.get());
      std::unique_ptr<ClientConnection> connection(new ClientConnection(std::move(socket)));
      try {
        connection->handshake(options, client, deadline, check);
        return connection;
      } catch (const ServerLost& lost) {
        error = lost.reason;
        if (++silent_closes == kSilentCloses) throw ConnectFailure{ConnectFailure::Kind::kNotAStore, error};
      } catch (const DeadlinePassed&) {
        throw ConnectFailure{ConnectFailure::Kind::kNotAStore, "it accepts connections and says nothing"};
      }
    }
    if (deadline.passed()) throw ConnectFailure{ConnectFailure::Kind::kTimeout, error};
    pause(next_pause, deadline, check);
  }
}

void ClientConnection::handshake(const Client::Options& options, uint64_t client, Deadline deadline,
                                 const Check& check) {
  using Kind = ConnectFailure::Kind;
  const Hello hello = make_hello(options.identity, client, options.flags);
  send_all({reinterpret_cast<const char*>(&hello), sizeof hello}, deadline, check);
  pollfd event{socket_.get(), POLLIN, 0};
  const Deadline expected{std::min(deadline.at_ns, Deadline::after(kAnswerSeconds).at_ns)};
  if (!wait_for(&event, 1, expected, check) && !deadline.passed()) warn_silent(options);
  Welcome welcome;
  receive_exactly(welcome.magic, sizeof welcome.magic, deadline, check);
  if (std::string_view(welcome.magic, sizeof welcome.magic) != kMagic) {
    const std::string first = printable({welcome.magic, sizeof welcome.magic});
    throw ConnectFailure{Kind::kNotAStore, "its first bytes are '" + first + "'"};
  }
  receive_exactly(welcome.magic + sizeof welcome.magic, sizeof welcome - sizeof welcome.magic, deadline, check);
  if (welcome.admission != static_cast<uint32_t>(Admission::kWelcome)) throw refusal(welcome);
  if (!options.identity.job_key.empty()) prove_key(options, hello, welcome, deadline, check);
}

void ClientConnection::prove_key(const Client::Options& options, const Hello& hello, const Welcome& welcome,
                                 Deadline deadline, const Check& check) {
  using Kind = ConnectFailure::Kind;
  if (welcome.proof == Digest{}) throw ConnectFailure{Kind::kServerHasNoKey, job_of(welcome.job)};
  if (!server_proof_holds(options.identity, hello, welcome)) throw ConnectFailure{Kind::kWrongKey, job_of(welcome.job)};
  const Digest proof = client_proof(options.identity, hello, welcome);
  send_all({reinterpret_cast<const char*>(proof.data()), proof.size()}, deadline, check);
  uint32_t verdict;
  receive_exactly(&verdict, sizeof verdict, deadline, check);
  if (verdict != static_cast<uint32_t>(Admission::kWelcome)) {
    throw ConnectFailure{Kind::kWrongKey, job_of(welcome.job)};
  }
}

Reply ClientConnection::request(Op op, std::string_view head, std::string_view tail, Deadline deadline,
                                const Check& check) {
  const uint32_t number = next_request_++;
  const Header header{static_cast<uint32_t>(head.size() + tail.size()), static_cast<uint8_t>(op), {}, number};
  frame_.assign(reinterpret_cast<const char*>(&header), sizeof header);
  frame_.append(head);
  const bool joined = tail.size() <= kCopyBytes;
  if (joined) frame_.append(tail);
  // An exception in the middle of a frame leaves the stream unusable.
  intact_ = false;
  try {
    send_all(frame_, deadline, check);
    if (!joined) send_all(tail, deadline, check);
  } catch (const DeadlinePassed&) {
    return {Status::kCancelled, {}};
  }
  try {
    return receive_reply(number, deadline, check);
  } catch (const DeadlinePassed&) {
    return cancel(number);
  } catch (const ServerLost&) {
    throw;
  } catch (...) {
    cancel(number);
    throw;
  }
}

// Cancel the request and return its one reply: kCancelled, or a reply that was sent before. Without a reply within
// kCancelSeconds (a stopped server), the connection is not intact; dropping it cancels the request.
Reply ClientConnection::cancel(uint32_t request) {
  const Header header{sizeof request, static_cast<uint8_t>(Op::kCancel), {}, next_request_++};
  char frame[sizeof header + sizeof request];
  std::memcpy(frame, &header, sizeof header);
  std::memcpy(frame + sizeof header, &request, sizeof request);
  const Deadline soon = Deadline::after(kCancelSeconds);
  if (received_ > 0) return {Status::kCancelled, {}};
  try {
    send_all({frame, sizeof frame}, soon, kNoCheck);
    return receive_reply(request, soon, kNoCheck);
  } catch (const DeadlinePassed&) {
    return {Status::kCancelled, {}};
  } catch (const ServerLost&) {
    return {Status::kCancelled, {}};
  }
}

Reply ClientConnection::receive_reply(uint32_t request, Deadline deadline, const Check& check) {
  // For nearly every reply, one read returns the header and the body.
  char first[4096];
  size_t have = 0;
  received_ = 0;
  while (have < sizeof(Header)) {
    have += receive_some(first + have, sizeof first - have, deadline, check);
    received_ = have;
  }
  Header header;
  std::memcpy(&header, first, sizeof header);
  const size_t with_header = have - sizeof header;
  if (header.request != request || header.length > kMaxFrameBytes || with_header > header.length) {
    throw ServerLost{"it sent a malformed reply"};
  }
  Reply reply{static_cast<Status>(header.op), std::string(first + sizeof header, with_header)};
  if (with_header < header.length) {
    reply.body.resize(header.length);
    receive_exactly(reply.body.data() + with_header, header.length - with_header, deadline, check);
  }
  intact_ = true;
  return reply;
}

// Blocks in recv, which needs one system call; the socket's timeout (see configure) limits each call to a slice.
size_t ClientConnection::receive_some(void* data, size_t bytes, Deadline deadline, const Check& check) {
  while (true) {
    pollfd event{socket_.get(), POLLIN, 0};
    if (deadline.remaining_ns(kSliceNs) < kSliceNs && !wait_for(&event, 1, deadline, check)) throw DeadlinePassed{};
    const ssize_t got = recv(socket_.get(), data, bytes, 0);
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0) throw ServerLost{"it closed the connection"};
    if (errno != EAGAIN && errno != EINTR) throw ServerLost{error_text(errno)};
    check();
  }
}

void ClientConnection::send_all(std::string_view bytes, Deadline deadline, const Check& check) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) throw ServerLost{error_text(errno)};
    check();
    if (deadline.passed()) throw DeadlinePassed{};
  }
}

void ClientConnection::receive_exactly(void* data, size_t bytes, Deadline deadline, const Check& check) {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const size_t got = receive_some(next, bytes, deadline, check);
    next += got;
    bytes -= got;
  }
}

}  // namespace procgroup::store
