// One connection of a client: a socket after its handshake, used by one thread at a time.
#pragma once

#include "store/client.hpp"

namespace procgroup::store {

class ClientConnection {
 public:
  // Connect to the address that accepts first, and perform the handshake. Throws ConnectFailure.
  static std::unique_ptr<ClientConnection> open(const Client::Options& options, uint64_t client, Deadline deadline,
                                                const Check& check);

  // As Client::request. After an exception the connection may be used again only if intact().
  Reply request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check);
  // Whether the stream is between two frames.
  bool intact() const { return intact_; }

 private:
  explicit ClientConnection(FileDescriptor socket) : socket_(std::move(socket)) {}

  void handshake(const Client::Options& options, uint64_t client, Deadline deadline, const Check& check);
  void prove_key(const Client::Options& options, const Hello& hello, const Welcome& welcome, Deadline deadline,
                 const Check& check);
  void send_all(std::string_view bytes, Deadline deadline, const Check& check);
  void receive_exactly(void* data, size_t bytes, Deadline deadline, const Check& check);
  size_t receive_some(void* data, size_t bytes, Deadline deadline, const Check& check);
  Reply receive_reply(uint32_t request, Deadline deadline, const Check& check);
  Reply cancel(uint32_t request);

  FileDescriptor socket_;
  uint32_t next_request_ = 1;
  bool intact_ = true;
  size_t received_ = 0;  // bytes of the current reply
  std::string frame_;    // reused from request to request
};

}  // namespace procgroup::store
