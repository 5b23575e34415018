#include "store/server.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/native_thread.hpp"
#include "store/server_loop.hpp"

namespace procgroup::store {
namespace {

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

}  // namespace procgroup::store
