// A client of a store's server: blocking requests, from any number of threads at once.
//
// Each request uses one connection exclusively; idle connections are reused. So a thread that waits for a
// key never delays another thread, and replies need no dispatching.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/file_descriptor.hpp"
#include "store/requests.hpp"

namespace procgroup::store {

// No connection was made before the deadline, or the server at the address is not this job's store.
struct ConnectFailure {
  enum class Kind { kTimeout, kNotAStore, kOtherVersion, kOtherJob, kKeyNeeded, kWrongKey, kServerHasNoKey, kFull };
  Kind kind;
  std::string detail;
};
// The connection to the server was lost; every later request throws this as well.
struct ServerLost {
  std::string reason;
};

// The random id of a client, registered in this process while the client exists.
class ClientId {
 public:
  ClientId();
  ~ClientId();
  ClientId(const ClientId&) = delete;
  ClientId& operator=(const ClientId&) = delete;

  // Whether a client of this process has the id.
  static bool is_of_this_process(uint64_t id);

  uint64_t value() const { return value_; }
  // Replace the id by a new one, in a forked child. Requires fork_mutex().
  void renew();

 private:
  uint64_t value_;
};

class ClientConnection;

class Client {
 public:
  struct Options {
    std::vector<std::string> addresses;  // numeric
    int port = 0;
    Identity identity;
    uint32_t flags = 0;  // HelloFlag
  };

  // Connects; repeats failed attempts until the deadline. Throws ConnectFailure, or what `check` throws.
  Client(Options options, Deadline deadline, const Check& check);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Send one request, whose body is `head` followed by `tail`, and wait for its reply; kCancelled when the deadline
  // passes first. Throws ServerLost, ConnectFailure, or what `check` throws; the request is then cancelled.
  Reply request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check);

  // Close the idle connections, and refuse later requests. Idempotent.
  void close();
  const Options& options() const { return options_; }

 private:
  // Returns null when the deadline passes first.
  std::unique_ptr<ClientConnection> acquire(Deadline deadline, const Check& check);
  void release(std::unique_ptr<ClientConnection> connection);
  void reset_after_fork();
  [[noreturn]] void lose(const std::string& reason);

  Options options_;
  // Guarded by fork_mutex(), so that a forked child never has a half-changed copy.
  ClientId id_;
  uint64_t generation_;
  std::vector<std::unique_ptr<ClientConnection>> idle_;
  std::string lost_;  // the reason, once the server is lost or the client is closed
};

// One connection of a client: a socket after its handshake, used by one thread at a time.
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
