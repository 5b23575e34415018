// A client of the store: blocking requests, from any number of threads at once.
//
// Each request uses a connection of its own for as long as it lasts; idle connections are kept for the
// next one. So a thread that waits for a key never delays another thread, and a reply needs no sorting.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/file_descriptor.hpp"
#include "store/handshake.hpp"
#include "store/request.hpp"

namespace procgroup::store {

// No connection could be made before the deadline, or the other side is not this job's store.
struct ConnectFailure {
  enum class Kind { kTimeout, kNotAStore, kOtherVersion, kOtherJob, kKeyNeeded, kWrongKey, kServerHasNoKey, kFull };
  Kind kind;
  std::string detail;
};
// The server is gone, now and for every later request.
struct ServerLost {
  std::string reason;
};
// The deadline passed.
struct DeadlinePassed {
  std::string body;  // of the reply kCancelled, when it came
};

class ClientConnection;

// The random id of a client, known in this process for as long as the client lives.
class ClientId {
 public:
  ClientId();
  ~ClientId();
  ClientId(const ClientId&) = delete;
  ClientId& operator=(const ClientId&) = delete;

  // Whether a client of this process has that id.
  static bool is_of_this_process(uint64_t id);

  uint64_t value() const { return value_; }
  // Become the id of another client; with fork_mutex() held.
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

  // Connects, trying again until the deadline. Throws ConnectFailure, or what `check` throws.
  Client(Options options, Deadline deadline, const Check& check);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Send one request, whose body is `head` followed by `tail`, and wait for its reply. Throws ServerLost,
  // DeadlinePassed (the request is then withdrawn), ConnectFailure, or what `check` throws.
  Reply request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check);

  // Close the idle connections, and refuse later requests. Idempotent.
  void close();
  const Options& options() const { return options_; }

 private:
  std::unique_ptr<ClientConnection> acquire(Deadline deadline, const Check& check);
  void release(std::unique_ptr<ClientConnection> connection);
  void leave_parent_behind();
  [[noreturn]] void lose(const std::string& reason);

  Options options_;
  // All of these are guarded by fork_mutex(), so that a forked child finds them whole.
  ClientId id_;
  uint64_t generation_;
  std::vector<std::unique_ptr<ClientConnection>> idle_;
  std::string lost_;  // why, once the server is lost or the client closed
};

}  // namespace procgroup::store
