#include "store/client.hpp"

#include <algorithm>

#include "store/client_connection.hpp"

namespace procgroup::store {
namespace {

constexpr double kReconnectSeconds = 10;

uint64_t random_id() {
  uint64_t id;
  fill_random(&id, sizeof id);
  return id;
}

}  // namespace

Client::Client(Options options, Deadline deadline, const Check& check)
    : options_(std::move(options)), id_(random_id()), generation_(fork_generation()) {
  idle_.push_back(ClientConnection::open(options_, id_, deadline, check));
}

Client::~Client() = default;

ServerReply Client::request(Op op, std::string_view head, std::string_view tail, Deadline deadline,
                            const Check& check) {
  std::unique_ptr<ClientConnection> connection = acquire(deadline, check);
  try {
    ServerReply reply = connection->request(op, head, tail, deadline, check);
    release(std::move(connection));
    return reply;
  } catch (const ServerLost& lost) {
    lose(lost.reason);
  } catch (...) {
    if (connection->intact()) release(std::move(connection));
    throw;
  }
}

// A forked child has none of its parent's connections left and is a client of its own, which is not the
// process that hosts the server. Called with fork_mutex() held; what it drops has no descriptor any more.
void Client::leave_parent_behind() {
  generation_ = fork_generation();
  options_.flags = 0;
  id_ = random_id();
  idle_.clear();
}

std::unique_ptr<ClientConnection> Client::acquire(Deadline deadline, const Check& check) {
  uint64_t id;
  {
    const std::lock_guard lock(fork_mutex());
    if (generation_ != fork_generation()) leave_parent_behind();
    if (!lost_.empty()) throw ServerLost{lost_};
    if (!idle_.empty()) {
      std::unique_ptr<ClientConnection> connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
    id = id_;
  }
  // The server has answered before: when it no longer does, it is lost rather than late.
  const Deadline patience{std::min(deadline.at_ns, Deadline::after(kReconnectSeconds).at_ns)};
  try {
    return ClientConnection::open(options_, id, patience, check);
  } catch (const ConnectFailure& failure) {
    // A server that is stopped, or long away from its core, lets the kernel accept and then says nothing.
    using Kind = ConnectFailure::Kind;
    const bool silent = failure.kind == Kind::kTimeout || (failure.kind == Kind::kNotAStore && patience.passed());
    if (!silent) throw;
    if (deadline.passed()) throw DeadlinePassed{};
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
