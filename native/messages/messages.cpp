#include "messages/messages.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "messages/connection.hpp"
#include "messages/matching.hpp"
#include "messages/transfer.hpp"
#include "runtime/failure_record.hpp"

namespace procgroup {

struct Messages::State {
  State(int own_rank, int world_size) : rank(own_rank), matching(world_size) {
    for (int peer = 0; peer < world_size; ++peer)
      connections.push_back(std::make_unique<Connection>(peer, world_size, matching));
  }

  Connection& with(int peer) {
    if (peer < 0 || peer >= static_cast<int>(connections.size()) || peer == rank) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " cannot exchange messages with rank " +
                                  std::to_string(peer) + " of " + std::to_string(connections.size()));
    }
    return *connections[static_cast<size_t>(peer)];
  }

  bool is_failed(int peer) const { return connections[static_cast<size_t>(peer)]->failure() != nullptr; }

  // The failure of this receive: its peer's, or with any source that of the last peer that could still have sent; null
  // while one lives.
  const Failure* failure_of(const ReceiveTransfer& receive) const {
    const Failure* failure = nullptr;
    for (const auto& connection : connections) {
      if (connection.get() == connections[static_cast<size_t>(rank)].get()) continue;
      if (!receive.accepts(connection->peer())) continue;
      failure = connection->failure();
      if (failure == nullptr) return nullptr;
    }
    return failure;
  }

  void fail(int peer, const Failure& failure) {
    with(peer).fail(failure);
    const auto lost = [&](const ReceiveTransfer& receive) { return failure_of(receive) != nullptr; };
    for (const auto& receive : matching.take_posted_if(lost)) receive->fail(failure);
  }

  void fail_if_faulty(int peer) {
    const Connection& connection = with(peer);
    if (connection.fault() == nullptr || connection.failure() != nullptr) return;
    const std::optional<Failure> stated = stated_end ? stated_end(peer) : std::nullopt;
    fail(peer, stated ? *stated : *connection.fault());
  }

  // Write the queued frames. Small messages are written in the call that sends them. The announcement of a large one,
  // and the answer to it, wait for the next pump(): a caller with several transfers so writes all frames at once.
  void write_now(int peer) {
    with(peer).write();
    fail_if_faulty(peer);
  }

  void send(const std::shared_ptr<SendTransfer>& transfer) {
    Connection& connection = with(transfer->peer);
    if (connection.failure() != nullptr) return transfer->fail(*connection.failure());
    connection.send(transfer);
    if (transfer->size <= kEagerBytes) write_now(transfer->peer);
  }

  void receive(const std::shared_ptr<ReceiveTransfer>& receive) {
    if (receive->peer != kAnySource) with(receive->peer);
    if (auto message = matching.take_unexpected(*receive)) {
      const int source = message->source;
      with(source).accept(*std::move(message), receive);
      fail_if_faulty(source);
    } else if (const Failure* failure = failure_of(*receive)) {
      receive->fail(*failure);
    } else {
      matching.post(receive);
    }
  }

  bool pump(int peer) {
    Connection& connection = with(peer);
    if (!connection.attached()) return false;
    bool moved = connection.write();
    const bool read = connection.read();
    if (connection.read_exposed() || read) moved = connection.write() || true;
    fail_if_faulty(peer);
    return moved;
  }

  const int rank;
  Matching matching;
  std::function<std::optional<Failure>(int peer)> stated_end;
  std::vector<std::unique_ptr<Connection>> connections;  // by world rank; our own is never used
};

Messages::Messages(int rank, int world_size) : state_(std::make_unique<State>(rank, world_size)) {}
Messages::~Messages() = default;

void Messages::attach(int peer, std::unique_ptr<Channel> channel, const SingleCopy* single_copy) {
  Connection& connection = state_->with(peer);
  if (connection.attached()) throw std::logic_error("rank " + std::to_string(peer) + " has a channel already");
  if (connection.failure() != nullptr) return;  // lost for good: the new channel is closed
  connection.attach(std::move(channel), single_copy);
  state_->write_now(peer);
}

bool Messages::attached(int peer) const { return state_->with(peer).attached(); }

std::shared_ptr<Transfer> Messages::send(int peer, MessageKey key, const void* data, size_t bytes, ElementType type) {
  auto transfer = std::make_shared<SendTransfer>(peer, key, data, bytes);
  transfer->type = type;
  state_->send(transfer);
  return transfer;
}

std::shared_ptr<Transfer> Messages::send(int peer, MessageKey key, std::span<const Iovec> iovecs, size_t offset,
                                         size_t bytes) {
  auto transfer = std::make_shared<SendTransfer>(peer, key, iovecs, offset, bytes);
  state_->send(transfer);
  return transfer;
}

void Messages::post(int peer, MessageKey key, std::vector<std::byte> message) {
  auto transfer = std::make_shared<SendTransfer>(peer, key, message.data(), message.size());
  transfer->kept = std::move(message);  // its bytes stay where they are
  state_->send(transfer);
  state_->write_now(peer);
}

void Messages::post_exit(int peer, const Failure& failure) {
  post(peer, kExitKey, encode(failure, static_cast<int>(state_->connections.size())));
}

void Messages::read_ends_with(std::function<std::optional<Failure>(int peer)> stated_end) {
  state_->stated_end = std::move(stated_end);
}

const Failure* Messages::exit_failure(int peer) const { return state_->with(peer).exit_failure(); }

bool Messages::has_left(int peer) const { return state_->with(peer).has_left(); }

void Messages::expect(int peer, bool begins) { state_->matching.expect(peer, begins); }

std::shared_ptr<Transfer> Messages::receive(int peer, MessageKey key, void* data, size_t capacity,
                                            const std::vector<int>* sources, ElementType type) {
  auto receive = std::make_shared<ReceiveTransfer>(peer, key, data, capacity, sources);
  receive->type = type;
  state_->receive(receive);
  return receive;
}

std::shared_ptr<Transfer> Messages::receive_up_to(int peer, MessageKey key, void* data, size_t capacity,
                                                  const std::vector<int>* sources) {
  auto receive = std::make_shared<ReceiveTransfer>(peer, key, data, capacity, sources);
  receive->takes_less = true;
  state_->receive(receive);
  return receive;
}

bool Messages::send_at_once(int peer, MessageKey key, const void* data, size_t bytes, ElementType type) {
  return bytes <= kEagerBytes && state_->with(peer).send_at_once(eager_header(key, bytes, type), data);
}

AtOnce Messages::receive_at_once(int peer, MessageKey key, void* data, size_t bytes, ElementType type) {
  if (bytes > kEagerBytes || state_->matching.holds(key)) return AtOnce::kNot;
  return state_->with(peer).receive_at_once(eager_header(key, bytes, type), data);
}

std::vector<uint64_t> Messages::unread_tags(int peer, uint64_t group) const {
  return state_->matching.unread_tags(peer, group);
}

void Messages::listen(MessageKey key, Listener listener) { state_->matching.listen(key, std::move(listener)); }

void Messages::cancel(Transfer& transfer, Failure failure) {
  if (transfer.is_completed()) return;
  if (auto* send = dynamic_cast<SendTransfer*>(&transfer)) {
    state_->with(send->peer).cancel(*send, failure);
    return state_->write_now(send->peer);
  }
  auto& receive = dynamic_cast<ReceiveTransfer&>(transfer);
  state_->matching.remove_posted(receive);
  receive.fail(std::move(failure));
  if (receive.source < 0) return;
  state_->with(receive.source).stop(receive);
  state_->write_now(receive.source);
}

bool Messages::pump() {
  bool moved = false;
  for (int peer = 0; peer < static_cast<int>(state_->connections.size()); ++peer) {
    if (peer != state_->rank) moved = state_->pump(peer) || moved;
  }
  return moved;
}

const Failure* Messages::peer_failure(int peer) const { return state_->with(peer).failure(); }

void Messages::fail_peer(int peer, Failure failure) { state_->fail(peer, failure); }

void Messages::descriptors(std::vector<pollfd>& into) const {
  for (const auto& connection : state_->connections) {
    const short events = connection->events();
    if (connection->descriptor() >= 0 && events != 0) into.push_back({connection->descriptor(), events, 0});
  }
}

bool Messages::is_quiet() const {
  return std::all_of(state_->connections.begin(), state_->connections.end(),
                     [](const auto& connection) { return connection->is_quiet(); });
}

std::vector<int> Messages::unsent_to() const {
  std::vector<int> peers;
  for (int peer = 0; peer < static_cast<int>(state_->connections.size()); ++peer)
    if (!state_->connections[static_cast<size_t>(peer)]->flushed()) peers.push_back(peer);
  return peers;
}

bool Messages::flushed() const {
  return std::all_of(state_->connections.begin(), state_->connections.end(),
                     [](const auto& connection) { return connection->flushed(); });
}

}  // namespace procgroup
