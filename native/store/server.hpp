// A key-value store's TCP server: one thread with one epoll set serves all clients.
//
// The server can also accept PyTorch's TCPStore clients at the same socket (see torch_store.hpp). Their keys are in
// a separate table, since their protocol has no authentication.
//
// All input is bounded by the limits in protocol.hpp, and for PyTorch's clients in torch_store.hpp. Malformed input
// closes its connection with one line on stderr and affects no other connection. The server does not read from a
// connection whose replies are not read, so that the queued output stays bounded.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace procgroup::store {

class Server {
 public:
  // Takes over a listening TCP socket. Throws std::system_error when it is none.
  Server(int listener, Identity identity, bool answers_torch = false);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  // Close every connection and end the thread. Idempotent.
  void stop();
  // End the thread as soon as clients() is 0.
  void drain();
  // Close the connections of PyTorch's clients and remove their keys; returns when that is done.
  void forget_torch();
  bool running() const { return shared_->running.load(std::memory_order_acquire); }
  // The number of open connections, without those of the store object that hosts this server (HelloFlag kHost).
  int clients() const { return shared_->clients.load(std::memory_order_acquire); }
  struct ClientInfo {
    uint32_t process;     // the process id that the client sent; 0: a client of PyTorch's, which sends none
    std::string address;  // "address:port"
    uint64_t client;      // the client's id (see ClientId); 0: a client of PyTorch's
  };
  // The connections that clients() counts.
  std::vector<ClientInfo> list_clients() const;
  uint64_t requests() const { return shared_->requests.load(std::memory_order_relaxed); }

 private:
  class Loop;
  // Shared with the server's thread. The thread stores `running` after it has closed the listener, and `clients` after
  // it has opened or closed the connection, both with release order; `requests` is only a counter. `stopping`,
  // `draining` and `forgets_ordered` are commands to the thread; a write to the eventfd follows each. `forgets_done`
  // is the last `forgets_ordered` that was carried out, and has its greatest value when the thread ends.
  struct Shared {
    std::atomic<bool> running{true};
    std::atomic<int> clients{0};
    std::atomic<uint64_t> requests{0};
    std::atomic<bool> stopping{false};
    std::atomic<bool> draining{false};
    std::atomic<uint64_t> forgets_ordered{0};
    std::atomic<uint64_t> forgets_done{0};

    void add_client(uint64_t connection, ClientInfo client);
    void remove_client(uint64_t connection);
    void remove_clients();
    void report_forgotten(uint64_t order);
    std::mutex list_mutex;
    std::map<uint64_t, ClientInfo> list;  // under list_mutex; by connection, as many as `clients`
  };

  void wake();

  int port_ = 0;
  uint64_t generation_;  // of the process that owns the thread; a forked child has none to join
  std::unique_ptr<Shared> shared_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace procgroup::store
