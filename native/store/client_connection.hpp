// One connection of a client: a socket that has passed the handshake, used by one thread at a time.
#pragma once

#include "store/client.hpp"

namespace procgroup::store {

class ClientConnection {
 public:
  // Connect to whichever address answers first and shake hands. Throws ConnectFailure.
  static std::unique_ptr<ClientConnection> open(const Client::Options& options, uint64_t client, Deadline deadline,
                                                const Check& check);

  // As Client::request. After an exception other than DeadlinePassed with `intact()`, it must be dropped.
  Reply request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check);
  // Whether the stream stands between two frames.
  bool intact() const { return intact_; }

 private:
  explicit ClientConnection(FileDescriptor socket) : socket_(std::move(socket)) {}

  void shake_hands(const Client::Options& options, uint64_t client, Deadline deadline, const Check& check);
  void prove_key(const Client::Options& options, const Hello& hello, const Welcome& welcome, Deadline deadline,
                 const Check& check);
  void send_all(std::string_view bytes, Deadline deadline, const Check& check);
  void receive_exactly(void* data, size_t bytes, Deadline deadline, const Check& check);
  size_t receive_some(void* data, size_t bytes, Deadline deadline, const Check& check);
  Reply receive_reply(uint32_t request, Deadline deadline, const Check& check);
  Reply withdraw(uint32_t request);

  FileDescriptor socket_;
  uint32_t next_request_ = 1;
  bool intact_ = true;
  size_t received_ = 0;  // bytes of the reply that is being received
  std::string frame_;    // reused from request to request
};

}  // namespace procgroup::store
