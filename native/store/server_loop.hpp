// The server's thread: every connection, and the tables that they ask.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "store/connection.hpp"
#include "store/server.hpp"
#include "store/table.hpp"
#include "store/torch_table.hpp"

struct epoll_event;

namespace procgroup::store {

// server_loop.cpp accepts, polls and ends connections; server_requests.cpp reads what they ask, and answers;
// server_torch.cpp does so for PyTorch's clients.
class Server::Loop {
 public:
  Loop(int listener, int port, Identity identity, bool answers_torch, Shared& shared);
  void run();
  int waker() const { return wake_.get(); }

 private:
  // The listener and the eventfd have the numbers before it.
  static constexpr uint64_t kFirstConnectionId = 2;

  void turn(const epoll_event& event);
  void accept_some();
  void pause_accepting();
  void resume_accepting();
  void admit(FileDescriptor socket, const sockaddr_storage& address);
  void read_from(Connection& connection);
  void use_input(Connection& connection);
  size_t use_one(Connection& connection, std::string_view input);
  size_t use_hello(Connection& connection, std::string_view input);
  size_t use_proof(Connection& connection, std::string_view input);
  size_t use_frame(Connection& connection, std::string_view input);
  size_t use_torch_validation(Connection& connection, std::string_view input);
  size_t use_torch_request(Connection& connection, std::string_view input);
  void open(Connection& connection);
  void write_to(Connection& connection);
  void after_send(Connection& connection, bool ok);
  void deliver(Ticket ticket, Answer&& answer);
  void deliver_torch(uint64_t id, TorchReply&& reply);
  void count_torch(Connection& connection);
  void check_torch_room(size_t bytes) const;
  void go_on_with_input();
  void forget_torch();
  void refuse(Connection& connection, const std::string& reason);
  void doom(Connection& connection);
  void bury_the_doomed();
  void end_late_handshakes();
  int milliseconds_to_next_deadline() const;
  bool watch(int operation, int descriptor, uint32_t events, uint64_t id);
  void log(const std::string& text) const;

  FileDescriptor listener_;
  FileDescriptor epoll_;
  FileDescriptor wake_;
  const int port_;
  const Identity identity_;
  const bool answers_torch_;
  Shared& shared_;
  Table table_;
  TorchTable torch_table_;
  size_t torch_queued_bytes_ = 0;     // of all connections' counted_bytes
  std::vector<uint64_t> unfinished_;  // connections whose input waits for the next turn
  uint64_t next_id_ = kFirstConnectionId;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<std::pair<Deadline, uint64_t>> handshakes_;
  std::vector<uint64_t> doomed_;
  Deadline accept_again_ = Deadline::never();
};

}  // namespace procgroup::store
