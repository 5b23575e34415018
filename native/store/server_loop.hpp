// The work of the server's thread: its connections, and the tables on which it runs their requests.
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
#include "store/torch_store.hpp"

struct epoll_event;

namespace procgroup::store {

// server.cpp accepts, polls and closes connections; server_requests.cpp reads requests and sends replies.
class Server::Loop {
 public:
  Loop(int listener, int port, Identity identity, bool answers_torch, Shared& shared);
  void run();
  int waker() const { return wake_.get(); }

 private:
  // The numbers before it are those of the listener and the eventfd in the epoll set.
  static constexpr uint64_t kFirstConnectionId = 2;

  void handle_event(const epoll_event& event);
  void accept_some();
  void pause_accepting();
  void resume_accepting();
  void admit(FileDescriptor socket, const sockaddr_storage& address);
  void read_from(ServerConnection& connection);
  void handle_input(ServerConnection& connection);
  // Handle what `input` begins with, by the connection's state. Each returns the number of bytes that it used; 0 when
  // the input is incomplete.
  size_t handle_one(ServerConnection& connection, std::string_view input);
  size_t handle_hello(ServerConnection& connection, std::string_view input);
  size_t handle_proof(ServerConnection& connection, std::string_view input);
  size_t handle_frame(ServerConnection& connection, std::string_view input);
  size_t handle_torch_validation(ServerConnection& connection, std::string_view input);
  size_t handle_torch_request(ServerConnection& connection, std::string_view input);
  void open(ServerConnection& connection);
  void write_to(ServerConnection& connection);
  void after_send(ServerConnection& connection, bool ok);
  void deliver(Ticket ticket, StoreAnswer&& answer);
  void deliver_torch(uint64_t id, TorchReply&& reply);
  void count_torch(ServerConnection& connection);
  void check_torch_queued(size_t bytes) const;
  void resume_unfinished();
  void forget_torch();
  void refuse(ServerConnection& connection, const std::string& reason);
  void mark_closing(ServerConnection& connection);
  void close_marked();
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
  std::vector<uint64_t> unfinished_;  // connections with unused input, for the next iteration
  uint64_t next_id_ = kFirstConnectionId;
  std::unordered_map<uint64_t, std::unique_ptr<ServerConnection>> connections_;
  std::deque<std::pair<Deadline, uint64_t>> handshakes_;
  std::vector<uint64_t> closing_;  // marked; closed at the end of the iteration
  Deadline accept_again_ = Deadline::never();
};

}  // namespace procgroup::store
