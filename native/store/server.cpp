#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <system_error>

#include "base/log.hpp"
#include "base/native_thread.hpp"
#include "store/server_loop.hpp"

namespace procgroup::store {
namespace {

constexpr uint64_t kListenerId = 0;
constexpr uint64_t kWakeId = 1;
constexpr int kEventsPerTurn = 256;
constexpr int kAcceptsPerTurn = 256;
constexpr int kReadsOfRefused = 16;
// How long accepting pauses when the process has no descriptor left.
constexpr int64_t kAcceptPauseNs = 100'000'000;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::string describe(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
    return std::string(text).append(":").append(std::to_string(ntohs(four.sin_port)));
  }
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
  return std::string("[").append(text).append("]:").append(std::to_string(ntohs(six.sin6_port)));
}

void set_option(int socket, int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); }

// Send small replies at once, and detect a client whose host failed within about half a minute.
void configure(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

int port_of(int listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw std::system_error(errno, std::generic_category(), "getsockname");
  return ntohs(address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                            : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
}

}  // namespace

Server::Server(int listener, Identity identity, bool answers_torch)
    : port_(port_of(listener)),
      generation_(fork_generation()),
      shared_(std::make_unique<Shared>()),
      loop_(std::make_unique<Loop>(listener, port_, std::move(identity), answers_torch, *shared_)) {
  thread_ = std::make_unique<std::thread>(start_native_thread("pg-store", [loop = loop_.get()] { loop->run(); }));
}

Server::~Server() {
  stop();
  if (thread_) {
    // A forked child: the thread is not here, and its state may be half changed. Leave all of it alone.
    static_cast<void>(thread_.release());
    static_cast<void>(loop_.release());
    static_cast<void>(shared_.release());
  }
}

void Server::stop() {
  if (!thread_ || generation_ != fork_generation()) return;
  shared_->stopping.store(true, std::memory_order_release);
  wake();
  thread_->join();
  thread_.reset();
}

std::vector<Server::ClientInfo> Server::list_clients() const {
  const std::lock_guard lock(shared_->list_mutex);
  std::vector<ClientInfo> clients;
  for (const auto& [connection, client] : shared_->list) clients.push_back(client);
  return clients;
}

void Server::Shared::add_client(uint64_t connection, ClientInfo client) {
  const std::lock_guard lock(list_mutex);
  list.emplace(connection, std::move(client));
  clients.fetch_add(1, std::memory_order_release);
}

void Server::Shared::remove_client(uint64_t connection) {
  const std::lock_guard lock(list_mutex);
  if (list.erase(connection) > 0) clients.fetch_sub(1, std::memory_order_release);
}

void Server::Shared::remove_clients() {
  const std::lock_guard lock(list_mutex);
  list.clear();
  clients.store(0, std::memory_order_release);
}

void Server::Shared::report_forgotten(uint64_t order) {
  forgets_done.store(order, std::memory_order_release);
  forgets_done.notify_all();
}

void Server::forget_torch() {
  if (!thread_ || generation_ != fork_generation()) return;
  const uint64_t order = shared_->forgets_ordered.fetch_add(1, std::memory_order_acq_rel) + 1;
  wake();
  uint64_t done = shared_->forgets_done.load(std::memory_order_acquire);
  while (done < order) {
    shared_->forgets_done.wait(done, std::memory_order_acquire);
    done = shared_->forgets_done.load(std::memory_order_acquire);
  }
}

void Server::drain() {
  if (!thread_ || generation_ != fork_generation()) return;
  shared_->draining.store(true, std::memory_order_release);
  wake();
}

void Server::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(loop_->waker(), &one, sizeof one);
}

// --- the thread ---

Server::Loop::Loop(int listener, int port, Identity identity, bool answers_torch, Shared& shared)
    : listener_(listener),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      port_(port),
      identity_(std::move(identity)),
      answers_torch_(answers_torch),
      shared_(shared),
      table_([this](Ticket ticket, StoreAnswer&& answer) { deliver(ticket, std::move(answer)); }),
      torch_table_([this](uint64_t id, TorchReply&& reply) { deliver_torch(id, std::move(reply)); }) {
  if (!epoll_) fail("epoll_create1");
  if (!wake_) fail("eventfd");
  fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
  fcntl(listener, F_SETFD, FD_CLOEXEC);
  if (!watch(EPOLL_CTL_ADD, listener, EPOLLIN, kListenerId)) fail("epoll_ctl");
  if (!watch(EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWakeId)) fail("epoll_ctl");
}

void Server::Loop::run() {
  epoll_event events[kEventsPerTurn];
  while (!shared_.stopping.load(std::memory_order_acquire)) {
    if (shared_.draining.load(std::memory_order_acquire) && handshakes_.empty() &&
        shared_.clients.load(std::memory_order_relaxed) == 0) {
      break;
    }
    const int count = epoll_wait(epoll_.get(), events, kEventsPerTurn, milliseconds_to_next_deadline());
    for (int i = 0; i < count; ++i) handle_event(events[i]);
    resume_unfinished();
    if (accept_again_.at_ns != Deadline::never().at_ns && accept_again_.passed()) resume_accepting();
    if (!closing_.empty()) close_marked();
    if (!handshakes_.empty()) end_late_handshakes();
    forget_torch();
  }
  listener_.reset();
  connections_.clear();
  shared_.remove_clients();
  shared_.running.store(false, std::memory_order_release);
  shared_.report_forgotten(std::numeric_limits<uint64_t>::max());
}

void Server::Loop::handle_event(const epoll_event& event) {
  if (event.data.u64 == kListenerId) return accept_some();
  if (event.data.u64 == kWakeId) {
    uint64_t times;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &times, sizeof times);
    return;
  }
  const auto found = connections_.find(event.data.u64);
  if (found == connections_.end() || found->second->closing) return;
  ServerConnection& connection = *found->second;
  if (event.events & EPOLLOUT) write_to(connection);
  if (connection.closing) return;
  if (event.events & EPOLLIN) {
    read_from(connection);
  } else if (event.events & (EPOLLERR | EPOLLHUP)) {
    mark_closing(connection);
  }
}

void Server::Loop::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int number =
        accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (number >= 0) {
      admit(FileDescriptor(number), address);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      return pause_accepting();
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

void Server::Loop::pause_accepting() {
  log("cannot accept more connections now (" + std::generic_category().message(errno) + "); raise `ulimit -n`");
  watch(EPOLL_CTL_MOD, listener_.get(), 0, kListenerId);
  accept_again_ = {now_ns() + kAcceptPauseNs};
}

void Server::Loop::resume_accepting() {
  watch(EPOLL_CTL_MOD, listener_.get(), EPOLLIN, kListenerId);
  accept_again_ = Deadline::never();
}

void Server::Loop::admit(FileDescriptor socket, const sockaddr_storage& address) {
  configure(socket.get());
  const uint64_t id = next_id_++;
  auto connection = std::make_unique<ServerConnection>(id, std::move(socket), describe(address));
  if (connections_.size() >= kMaxConnections) {
    const Welcome full = make_refusal(identity_, Admission::kFull);
    connection->send({reinterpret_cast<const char*>(&full), sizeof full});
    return log("refused " + connection->peer + ": " + std::to_string(kMaxConnections) + " connections are open");
  }
  if (!watch(EPOLL_CTL_ADD, connection->socket.get(), EPOLLIN, id)) {
    return log("refused " + connection->peer + ": " + std::generic_category().message(errno));
  }
  handshakes_.emplace_back(Deadline::after(kHandshakeSeconds), id);
  connections_.emplace(id, std::move(connection));
}

void Server::Loop::refuse(ServerConnection& connection, const std::string& reason) {
  log("closed the connection from " + connection.peer + ": " + reason);
  // Read what has arrived: closing a socket with unread bytes sends a reset, which could discard the refusal.
  shutdown(connection.socket.get(), SHUT_WR);
  for (int i = 0; i < kReadsOfRefused && connection.receive() == ServerConnection::Receipt::kSome; ++i) {
    connection.use(connection.input().size());
  }
  mark_closing(connection);
}

void Server::Loop::mark_closing(ServerConnection& connection) {
  if (connection.closing) return;
  connection.closing = true;
  closing_.push_back(connection.id);
}

void Server::Loop::close_marked() {
  // Keys that are set on disconnect end waits of other connections, and sending to these can mark more of them.
  for (size_t i = 0; i < closing_.size(); ++i) {
    const uint64_t id = closing_[i];
    const auto found = connections_.find(id);
    shared_.remove_client(id);
    torch_queued_bytes_ -= found->second->counted_bytes;
    connections_.erase(found);
    torch_table_.forget(id);
    try {
      table_.forget(id);
    } catch (const std::bad_alloc&) {
      log("cannot set the keys of a connection that has ended: out of memory");
    }
  }
  closing_.clear();
}

void Server::Loop::end_late_handshakes() {
  while (!handshakes_.empty()) {
    const auto [deadline, id] = handshakes_.front();
    const auto found = connections_.find(id);
    const bool over = found == connections_.end() || found->second->is_open();
    if (!over && !deadline.passed()) return;
    handshakes_.pop_front();
    if (!over) refuse(*found->second, "no complete handshake within " + std::to_string(int(kHandshakeSeconds)) + " s");
  }
  close_marked();
}

int Server::Loop::milliseconds_to_next_deadline() const {
  if (!unfinished_.empty()) return 0;
  const int64_t handshake = handshakes_.empty() ? Deadline::never().at_ns : handshakes_.front().first.at_ns;
  const int64_t next = std::min(handshake, accept_again_.at_ns);
  if (next == Deadline::never().at_ns) return -1;
  return static_cast<int>(Deadline{next}.remaining_ns(int64_t{60} * 1'000'000'000) / 1'000'000) + 1;
}

bool Server::Loop::watch(int operation, int descriptor, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return epoll_ctl(epoll_.get(), operation, descriptor, &event) == 0;
}

void Server::Loop::log(const std::string& text) const {
  log_line(LogLevel::kWarning, "the store on port " + std::to_string(port_) + ": " + text);
}

}  // namespace procgroup::store
