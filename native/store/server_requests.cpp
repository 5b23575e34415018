// What connections say, from the handshake on, and what they are answered.
#include <sys/epoll.h>

#include <cstring>
#include <new>

#include "store/server_loop.hpp"

namespace procgroup::store {
namespace {

// How long one connection's requests are served before the others have their turn.
constexpr double kSliceSeconds = 0.002;

}  // namespace

void Server::Loop::read_from(Connection& connection) {
  switch (connection.receive()) {
    case Connection::Receipt::kSome:
      return use_input(connection);
    case Connection::Receipt::kNothing:
      return;
    case Connection::Receipt::kClosed:
      return doom(connection);
  }
}

void Server::Loop::use_input(Connection& connection) {
  const Deadline slice = Deadline::after(kSliceSeconds);
  try {
    count_torch(connection);
    if (connection.state == Connection::State::kTorch) check_torch_room(0);
    while (!connection.doomed && !connection.has_output()) {
      const std::string_view input = connection.input();
      const size_t used = input.empty() ? 0 : use_one(connection, input);
      if (used == 0) break;
      connection.use(used);
      if (slice.passed() && !connection.input().empty()) {
        unfinished_.push_back(connection.id);
        break;
      }
    }
    count_torch(connection);
  } catch (const ProtocolError& error) {
    refuse(connection, error.reason);
  } catch (const std::bad_alloc&) {
    refuse(connection, "its request needs more memory than there is");
  }
}

// Returns how many bytes were used; 0: more have to come first.
size_t Server::Loop::use_one(Connection& connection, std::string_view input) {
  switch (connection.state) {
    case Connection::State::kHello:
      return use_hello(connection, input);
    case Connection::State::kProof:
      return use_proof(connection, input);
    case Connection::State::kOpen:
      return use_frame(connection, input);
    case Connection::State::kTorch:
      return use_torch_request(connection, input);
  }
  return 0;
}

size_t Server::Loop::use_hello(Connection& connection, std::string_view input) {
  if (kTorchValidation.starts_with(input.substr(0, kTorchValidation.size()))) {
    return use_torch_validation(connection, input);
  }
  if (!kMagic.starts_with(input.substr(0, kMagic.size()))) {
    throw ProtocolError{"it does not speak the store's protocol; its first bytes: '" + printable(input) + "'"};
  }
  if (input.size() < sizeof(Hello)) return 0;
  std::memcpy(&connection.hello, input.data(), sizeof(Hello));
  connection.welcome = make_welcome(identity_, connection.hello);
  const Welcome& welcome = connection.welcome;
  const auto admission = static_cast<Admission>(welcome.admission);
  // Opened before it is told: a server that stops after its last guest must know of each client that was welcomed.
  if (admission == Admission::kWelcome) {
    if (identity_.job_key.empty()) {
      open(connection);
    } else {
      connection.state = Connection::State::kProof;
    }
  }
  after_send(connection, connection.send({reinterpret_cast<const char*>(&welcome), sizeof welcome}));
  switch (admission) {
    case Admission::kWelcome:
      return sizeof(Hello);
    case Admission::kOtherJob:
      throw ProtocolError{"it belongs to job '" + printable(job_of(connection.hello.job)) + "'"};
    case Admission::kKeyNeeded:
      throw ProtocolError{"it does not know the job's key"};
    default:
      throw ProtocolError{"it speaks version " + std::to_string(connection.hello.version) + " of the protocol"};
  }
}

size_t Server::Loop::use_proof(Connection& connection, std::string_view input) {
  Digest proof;
  if (input.size() < proof.size()) return 0;
  std::memcpy(proof.data(), input.data(), proof.size());
  const bool holds = same_digest(proof, client_proof(identity_, connection.hello, connection.welcome));
  if (holds) open(connection);
  const auto verdict = static_cast<uint32_t>(holds ? Admission::kWelcome : Admission::kWrongKey);
  after_send(connection, connection.send({reinterpret_cast<const char*>(&verdict), sizeof verdict}));
  if (!holds) throw ProtocolError{"its job key is a different one"};
  return proof.size();
}

void Server::Loop::open(Connection& connection) {
  connection.state = Connection::State::kOpen;
  if (!(connection.hello.flags & kHost)) {
    shared_.add_guest(connection.id, {connection.hello.process, connection.peer, client_of(connection.hello)});
  }
  if (connection.hello.flags & kJoins) table_.join(client_of(connection.hello));
}

size_t Server::Loop::use_frame(Connection& connection, std::string_view input) {
  Header header;
  if (input.size() < sizeof header) return 0;
  std::memcpy(&header, input.data(), sizeof header);
  if (header.length > kMaxFrameBytes) {
    throw ProtocolError{"a frame of " + std::to_string(header.length) + " bytes, more than the limit of " +
                        std::to_string(kMaxFrameBytes)};
  }
  const size_t whole = sizeof header + header.length;
  if (input.size() < whole) return 0;
  if (table_.waits_of(connection.id) >= kMaxWaitsPerConnection && static_cast<Op>(header.op) != Op::kCancel) {
    throw ProtocolError{"more than " + std::to_string(kMaxWaitsPerConnection) + " requests that wait"};
  }
  shared_.requests.fetch_add(1, std::memory_order_relaxed);
  table_.run({connection.id, header.request}, static_cast<Op>(header.op), input.substr(sizeof header, header.length));
  return whole;
}

void Server::Loop::deliver(Ticket ticket, Answer&& answer) {
  const auto found = connections_.find(ticket.connection);
  if (found == connections_.end() || found->second->doomed) return;
  after_send(*found->second, found->second->send(ticket.request, answer));
}

void Server::Loop::go_on_with_input() {
  for (const uint64_t id : std::exchange(unfinished_, {})) {
    const auto found = connections_.find(id);
    if (found != connections_.end() && !found->second->doomed) use_input(*found->second);
  }
}

void Server::Loop::write_to(Connection& connection) {
  after_send(connection, connection.flush());
  count_torch(connection);
  // What came while its output was stuck has been waiting for this.
  if (!connection.doomed && !connection.has_output()) use_input(connection);
}

void Server::Loop::after_send(Connection& connection, bool ok) {
  if (!ok) return doom(connection);
  if (connection.has_output() == connection.polls_writable) return;
  connection.polls_writable = connection.has_output();
  const uint32_t events = connection.polls_writable ? EPOLLOUT : EPOLLIN;
  if (!watch(EPOLL_CTL_MOD, connection.socket.get(), events, connection.id)) doom(connection);
}

}  // namespace procgroup::store
