#include "store/client.hpp"

#include <algorithm>
#include <set>

namespace procgroup::store {
namespace {

constexpr double kReconnectSeconds = 10;

uint64_t random_id() {
  uint64_t id;
  fill_random(&id, sizeof id);
  return id;
}

// The ids of this process's clients; requires fork_mutex(). A forked child has none of its parent's clients.
std::set<uint64_t>& known_ids() {
  static auto* ids = new std::set<uint64_t>;
  static uint64_t generation = fork_generation();
  if (generation != fork_generation()) ids->clear();
  generation = fork_generation();
  return *ids;
}

}  // namespace

ClientId::ClientId() : value_(random_id()) {
  const std::lock_guard lock(fork_mutex());
  known_ids().insert(value_);
}

ClientId::~ClientId() {
  const std::lock_guard lock(fork_mutex());
  known_ids().erase(value_);
}

bool ClientId::is_of_this_process(uint64_t id) {
  const std::lock_guard lock(fork_mutex());
  return known_ids().contains(id);
}

void ClientId::renew() {
  known_ids().erase(value_);
  value_ = random_id();
  known_ids().insert(value_);
}

Client::Client(Options options, Deadline deadline, const Check& check)
    : options_(std::move(options)), generation_(fork_generation()) {
  idle_.push_back(ClientConnection::open(options_, id_.value(), deadline, check));
}

Client::~Client() = default;

Reply Client::request(Op op, std::string_view head, std::string_view tail, Deadline deadline, const Check& check) {
  std::unique_ptr<ClientConnection> connection = acquire(deadline, check);
  if (!connection) return {Status::kCancelled, {}};
  try {
    Reply reply = connection->request(op, head, tail, deadline, check);
    if (connection->intact()) release(std::move(connection));
    return reply;
  } catch (const ServerLost& lost) {
    lose(lost.reason);
  } catch (...) {
    if (connection->intact()) release(std::move(connection));
    throw;
  }
}

// A forked child is another client, without connections, and not in the process that hosts the server. The dropped
// connections have no descriptors any more. Requires fork_mutex().
void Client::reset_after_fork() {
  generation_ = fork_generation();
  options_.flags = 0;
  id_.renew();
  idle_.clear();
}

std::unique_ptr<ClientConnection> Client::acquire(Deadline deadline, const Check& check) {
  uint64_t id;
  {
    const std::lock_guard lock(fork_mutex());
    if (generation_ != fork_generation()) reset_after_fork();
    if (!lost_.empty()) throw ServerLost{lost_};
    if (!idle_.empty()) {
      std::unique_ptr<ClientConnection> connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
    id = id_.value();
  }
  // The server has replied before: if it does not reply within this time, it counts as lost.
  const Deadline reconnect{std::min(deadline.at_ns, Deadline::after(kReconnectSeconds).at_ns)};
  try {
    return ClientConnection::open(options_, id, reconnect, check);
  } catch (const ConnectFailure& failure) {
    // The kernel accepts connections for a server that is stopped or not scheduled; the handshake then times out.
    using Kind = ConnectFailure::Kind;
    const bool silent = failure.kind == Kind::kTimeout || (failure.kind == Kind::kNotAStore && reconnect.passed());
    if (!silent) throw;
    if (deadline.passed()) return nullptr;
    lose(failure.detail);
  }
}

void Client::release(std::unique_ptr<ClientConnection> connection) {
  const std::lock_guard lock(fork_mutex());
  if (lost_.empty()) idle_.push_back(std::move(connection));
}

void Client::lose(const std::string& reason) {
  std::vector<std::unique_ptr<ClientConnection>> dropped;
  {
    const std::lock_guard lock(fork_mutex());
    if (lost_.empty()) lost_ = reason;
    dropped.swap(idle_);
  }
  throw ServerLost{reason};
}

void Client::close() {
  std::vector<std::unique_ptr<ClientConnection>> dropped;
  const std::lock_guard lock(fork_mutex());
  if (lost_.empty()) lost_ = "this store was closed";
  dropped.swap(idle_);
}

}  // namespace procgroup::store
