// Requests of PyTorch's TCPStore clients, from the validation on, and the replies to them.
#include "store/server_loop.hpp"

namespace procgroup::store {

size_t Server::Loop::handle_torch_validation(Connection& connection, std::string_view input) {
  if (input.size() < kTorchValidation.size()) return 0;
  if (!answers_torch_) {
    throw ProtocolError{"it is a client of PyTorch's TCPStore, and this store answers clients of procgroup only"};
  }
  connection.state = Connection::State::kTorch;
  shared_.add_client(connection.id, {0, connection.peer, 0});
  return kTorchValidation.size();
}

size_t Server::Loop::handle_torch_request(Connection& connection, std::string_view input) {
  const std::optional<TorchRequest> request = connection.torch_parser.parse(input);
  if (!request) return 0;
  shared_.requests.fetch_add(1, std::memory_order_relaxed);
  torch_table_.run(connection.id, *request);
  return request->length;
}

void Server::Loop::deliver_torch(uint64_t id, TorchReply&& reply) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second->closing) return;
  Connection& connection = *found->second;
  try {
    check_torch_queued(reply.size());
  } catch (const ProtocolError& error) {
    return refuse(connection, error.reason);
  }
  after_send(connection, connection.send(reply));
  count_torch(connection);
}

void Server::Loop::count_torch(Connection& connection) {
  if (connection.state != Connection::State::kTorch) return;
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
    if (connection->state == Connection::State::kTorch) mark_closing(*connection);
  }
  close_marked();
  torch_table_.clear();
  shared_.report_forgotten(order);
}

}  // namespace procgroup::store
