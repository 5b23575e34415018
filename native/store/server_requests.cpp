// Reads the input of connections, from the handshake on, runs their requests and sends the replies; for PyTorch's
// TCPStore clients, too.
#include <sys/epoll.h>

#include <cstring>
#include <new>

#include "store/server_loop.hpp"

namespace procgroup::store {
namespace {

// How long the loop serves one connection before it serves the others.
constexpr double kSliceSeconds = 0.002;

}  // namespace

void Server::Loop::read_from(ServerConnection& connection) {
  const ServerConnection::Receipt receipt = connection.receive();
  if (receipt == ServerConnection::Receipt::kSome) handle_input(connection);
  if (receipt == ServerConnection::Receipt::kClosed) mark_closing(connection);
}

void Server::Loop::handle_input(ServerConnection& connection) {
  const Deadline slice = Deadline::after(kSliceSeconds);
  try {
    count_torch(connection);
    if (connection.state == ServerConnection::State::kTorch) check_torch_queued(0);
    while (!connection.closing && !connection.has_output()) {
      const std::string_view input = connection.input();
      const size_t used = input.empty() ? 0 : handle_one(connection, input);
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

size_t Server::Loop::handle_one(ServerConnection& connection, std::string_view input) {
  switch (connection.state) {
    case ServerConnection::State::kHello:
      return handle_hello(connection, input);
    case ServerConnection::State::kProof:
      return handle_proof(connection, input);
    case ServerConnection::State::kOpen:
      return handle_frame(connection, input);
    case ServerConnection::State::kTorch:
      return handle_torch_request(connection, input);
  }
  return 0;
}

size_t Server::Loop::handle_hello(ServerConnection& connection, std::string_view input) {
  if (kTorchValidation.starts_with(input.substr(0, kTorchValidation.size()))) {
    return handle_torch_validation(connection, input);
  }
  if (!kMagic.starts_with(input.substr(0, kMagic.size()))) {
    throw ProtocolError{"it does not speak the store's protocol; its first bytes: '" + printable(input) + "'"};
  }
  if (input.size() < sizeof(Hello)) return 0;
  std::memcpy(&connection.hello, input.data(), sizeof(Hello));
  connection.welcome = make_welcome(identity_, connection.hello);
  const Welcome& welcome = connection.welcome;
  const auto admission = static_cast<Admission>(welcome.admission);
  // Counted before the welcome is sent: a draining server must not end while a welcomed client is not yet counted.
  if (admission == Admission::kWelcome) {
    if (identity_.job_key.empty()) {
      open(connection);
    } else {
      connection.state = ServerConnection::State::kProof;
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

size_t Server::Loop::handle_proof(ServerConnection& connection, std::string_view input) {
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

void Server::Loop::open(ServerConnection& connection) {
  connection.state = ServerConnection::State::kOpen;
  if (!(connection.hello.flags & kHost)) {
    shared_.add_client(connection.id, {connection.hello.process, connection.peer, client_of(connection.hello)});
  }
  if (connection.hello.flags & kJoins) table_.join(client_of(connection.hello));
}

size_t Server::Loop::handle_frame(ServerConnection& connection, std::string_view input) {
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

void Server::Loop::deliver(Ticket ticket, StoreAnswer&& answer) {
  const auto found = connections_.find(ticket.connection);
  if (found == connections_.end() || found->second->closing) return;
  after_send(*found->second, found->second->send(ticket.request, answer));
}

void Server::Loop::resume_unfinished() {
  for (const uint64_t id : std::exchange(unfinished_, {})) {
    const auto found = connections_.find(id);
    if (found != connections_.end() && !found->second->closing) handle_input(*found->second);
  }
}

void Server::Loop::write_to(ServerConnection& connection) {
  after_send(connection, connection.flush());
  count_torch(connection);
  // Input was not handled while output was queued.
  if (!connection.closing && !connection.has_output()) handle_input(connection);
}

void Server::Loop::after_send(ServerConnection& connection, bool ok) {
  if (!ok) return mark_closing(connection);
  if (connection.has_output() == connection.polls_writable) return;
  connection.polls_writable = connection.has_output();
  const uint32_t events = connection.polls_writable ? EPOLLOUT : EPOLLIN;
  if (!watch(EPOLL_CTL_MOD, connection.socket.get(), events, connection.id)) mark_closing(connection);
}

// --- requests of PyTorch's clients, from the validation on ---

size_t Server::Loop::handle_torch_validation(ServerConnection& connection, std::string_view input) {
  if (input.size() < kTorchValidation.size()) return 0;
  if (!answers_torch_) {
    throw ProtocolError{"it is a client of PyTorch's TCPStore, and this store answers clients of procgroup only"};
  }
  connection.state = ServerConnection::State::kTorch;
  shared_.add_client(connection.id, {0, connection.peer, 0});
  return kTorchValidation.size();
}

size_t Server::Loop::handle_torch_request(ServerConnection& connection, std::string_view input) {
  const std::optional<TorchRequest> request = connection.torch_parser.parse(input);
  if (!request) return 0;
  shared_.requests.fetch_add(1, std::memory_order_relaxed);
  torch_table_.run(connection.id, *request);
  return request->length;
}

void Server::Loop::deliver_torch(uint64_t id, TorchReply&& reply) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second->closing) return;
  ServerConnection& connection = *found->second;
  try {
    check_torch_queued(reply.size());
  } catch (const ProtocolError& error) {
    return refuse(connection, error.reason);
  }
  after_send(connection, connection.send(reply));
  count_torch(connection);
}

void Server::Loop::count_torch(ServerConnection& connection) {
  if (connection.state != ServerConnection::State::kTorch) return;
  torch_queued_bytes_ -= std::exchange(connection.counted_bytes, connection.queued_bytes());
  torch_queued_bytes_ += connection.counted_bytes;
}

void Server::Loop::check_torch_queued(size_t bytes) const {
  if (torch_queued_bytes_ + bytes <= kTorchMaxQueuedBytes) return;
  throw ProtocolError{"the queued requests and replies of PyTorch's clients exceed the limit of " +
                      std::to_string(kTorchMaxQueuedBytes) + " bytes"};
}

// Closes the connections first: a client of an earlier attempt of the job must not set keys in the next attempt.
void Server::Loop::forget_torch() {
  const uint64_t order = shared_.forgets_ordered.load(std::memory_order_acquire);
  if (order == shared_.forgets_done.load(std::memory_order_relaxed)) return;
  for (const auto& [id, connection] : connections_) {
    if (connection->state == ServerConnection::State::kTorch) mark_closing(*connection);
  }
  close_marked();
  torch_table_.clear();
  shared_.report_forgotten(order);
}

}  // namespace procgroup::store
