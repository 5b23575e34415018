// The store's server: one thread, one epoll, any number of clients.
//
// It can answer PyTorch's TCPStore clients at the same socket (see torch_protocol.hpp). Their keys are a table of their
// own, since their protocol proves no secret.
//
// Whatever a client sends is bounded by the limits in protocol.hpp, and for PyTorch's clients in torch_protocol.hpp;
// what is not the protocol closes that connection with one line on stderr and concerns nobody else. A connection whose
// replies are not read is not read from either, so that its output stays bounded.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "store/handshake.hpp"

namespace procgroup::store {

class Server {
 public:
  // Takes over a listening TCP socket. Throws std::system_error when it is none.
  Server(int listener, Identity identity, bool answers_torch = false);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  // End now: every connection is closed. Idempotent.
  void stop();
  // End as soon as no client but those of this process is connected.
  void drain();
  // Close the connections of PyTorch's clients and forget their keys; returns when that is done.
  void forget_torch();
  bool running() const { return shared_->running.load(std::memory_order_acquire); }
  // Connected clients' connections, without those of this process.
  int guests() const { return shared_->guests.load(std::memory_order_acquire); }
  struct Guest {
    uint32_t process;     // as its client gave it; 0: one of PyTorch's, which gives none
    std::string address;  // "address:port"
    uint64_t client;      // the id of its client (see ClientId); 0: one of PyTorch's
  };
  // Those connections.
  std::vector<Guest> list_guests() const;
  uint64_t requests() const { return shared_->requests.load(std::memory_order_relaxed); }

 private:
  class Loop;
  // Written by the server's thread. `running` and `guests` are released after what they tell of has
  // happened (the listener is closed; the connection is admitted or closed); `requests` only counts.
  // `stopping`, `draining` and `forgets_ordered` are requests to the thread; the eventfd's write orders them.
  // `forgets_done` follows `forgets_ordered`, and has its greatest value when the thread ends.
  struct Shared {
    std::atomic<bool> running{true};
    std::atomic<int> guests{0};
    std::atomic<uint64_t> requests{0};
    std::atomic<bool> stopping{false};
    std::atomic<bool> draining{false};
    std::atomic<uint64_t> forgets_ordered{0};
    std::atomic<uint64_t> forgets_done{0};

    void add_guest(uint64_t connection, Guest guest);
    void remove_guest(uint64_t connection);
    void remove_guests();
    void report_forgotten(uint64_t order);
    std::mutex list_mutex;
    std::map<uint64_t, Guest> list;  // under list_mutex; by connection, as many as `guests`
  };

  void wake();

  int port_ = 0;
  uint64_t generation_;  // of the process that owns the thread; a forked child has none to join
  std::unique_ptr<Shared> shared_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace procgroup::store
