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
#include "store/handshake.hpp"
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

class ClientConnection;

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

}  // namespace procgroup::store
