// A store's server that answers PyTorch's TCPStore clients beside its own.
#include <netinet/tcp.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/store/store_fixture.hpp"
#include "tests/store/torch_requests.hpp"

namespace {

using namespace procgroup;           // NOLINT
using namespace procgroup::store;    // NOLINT
using namespace procgroup::testing;  // NOLINT

constexpr int kClients = 8;
constexpr int kTurns = 50;

// A client of torch's protocol; what it sends goes out as it is.
class TorchClient {
 public:
  explicit TorchClient(const Server& server) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server.port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    const int on = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    send(kTorchValidation);
  }
  // Returns whether the connection still took it.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Empty once the connection is closed.
  std::string receive(size_t size) {
    std::string bytes(size, '\0');
    return recv(socket_.get(), bytes.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size) ? bytes : std::string();
  }
  std::string ask(const std::string& bytes, size_t size) {
    CHECK(send(bytes));
    return receive(size);
  }
  void drain() {
    shutdown(socket_.get(), SHUT_WR);
    while (!receive(1).empty()) {
    }
  }

 private:
  FileDescriptor socket_;
};

uint64_t add_as_procgroup(const Server& server, std::string_view key, uint64_t amount) {
  Client client({{"127.0.0.1"}, server.port(), {}, 0}, soon(), kNothing);
  return add(client, key, amount);
}

void work(const Server& server, int rank) {
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  const std::string value(40'000, static_cast<char>('a' + rank));
  for (int turn = 0; turn < kTurns; ++turn) {
    CASE("rank %d, turn %d", rank, turn);
    const std::string prefix = "turn " + std::to_string(turn) + " of ";
    const std::string next = prefix + std::to_string((rank + 1) % kClients);
    client.ask(request(TorchOp::kAdd, sized("total") + number(1)), 8);
    CHECK(client.send(request(TorchOp::kSet, sized(prefix + std::to_string(rank)) + sized(value))));
    CHECK(client.ask(request_with_keys(TorchOp::kWait, {next, "total"}), 1)[0] == char(TorchWaitReply::kStopWaiting));
    CHECK(client.ask(request(TorchOp::kGet, sized(next)), 8 + value.size()).back() == 'a' + (rank + 1) % kClients);
    if (rank == 0) add_as_procgroup(server, "total", 1);
  }
}

void clients_of_both_protocols_share_a_server() {
  Server server(listen_on_loopback(), {}, true);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kClients; ++rank) threads.emplace_back([&, rank] { work(server, rank); });
  for (std::thread& thread : threads) thread.join();
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kAdd, sized("total") + number(0)), 8) == number(kClients * kTurns));
  CHECK(add_as_procgroup(server, "total", 0) == kTurns);
}

// Clients come, wait and are cut off, while another thread has them forgotten again and again.
void forgetting_closes_the_connections_and_clears_the_keys() {
  Server server(listen_on_loopback(), {}, true);
  add_as_procgroup(server, "kept", 7);
  std::atomic<int> cut_off{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 5; ++turn) {
        CASE("turn %d", turn);
        TorchClient client(server);
        client.send(request(TorchOp::kSet, sized("key") + sized("value")));
        client.send(request_with_keys(TorchOp::kWait, {"never"}));
        CHECK(client.receive(1).empty());
        ++cut_off;
      }
    });
  }
  while (cut_off < kClients * 5) server.forget_torch();
  for (std::thread& thread : threads) thread.join();
  server.forget_torch();
  TorchClient client(server);
  CHECK(client.ask(request(TorchOp::kNumKeys), 8) == number(0));
  CHECK(add_as_procgroup(server, "kept", 0) == 7);
  server.stop();
  server.forget_torch();
}

// Each is sent one large reply, which it does not read.
void clients_that_do_not_read_are_closed_beyond_the_bound() {
  Server server(listen_on_loopback(), {}, true);
  TorchClient writer(server);
  writer.send(request(TorchOp::kSet, sized("key") + sized(std::string(kTorchMaxValueBytes, 'x'))));
  CHECK(writer.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  constexpr size_t kMost = kTorchMaxQueuedBytes / (3 * kTorchMaxValueBytes);
  std::vector<std::unique_ptr<TorchClient>> idle;
  for (size_t i = 0; i < 4 * kMost; ++i) {
    idle.push_back(std::make_unique<TorchClient>(server));
    idle.back()->send(request_with_keys(TorchOp::kMultiGet, {"key", "key", "key"}));
  }
  while (server.list_clients().size() > 2 * kMost + 1) std::this_thread::yield();
  CHECK(writer.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  idle.clear();
  while (server.list_clients().size() > 1) std::this_thread::yield();
  const size_t reply = 8 + kTorchMaxValueBytes;
  CHECK(writer.ask(request(TorchOp::kGet, sized("key")), reply).size() == reply);
}

// A client that always has more requests does not keep the server from the others.
void a_stream_of_requests_leaves_turns_to_others() {
  Server server(listen_on_loopback(), {}, true);
  std::atomic<bool> begins{false};
  std::atomic<bool> ends{false};
  std::thread busy([&] {
    TorchClient client(server);
    begins = true;
    begins.notify_one();
    std::string stream = request(TorchOp::kSet, sized("key") + sized(std::string(1 << 20, 'x')));
    for (int i = 0; i < 1'000; ++i) stream += request(TorchOp::kAppend, sized("key") + sized("x"));
    while (!ends) client.send(stream);
  });
  begins.wait(false);
  for (int turn = 0; turn < 20; ++turn) CHECK(add_as_procgroup(server, "n", 1) == uint64_t(turn) + 1);
  ends = true;
  server.stop();
  busy.join();
}

void garbage_closes_its_connection_alone() {
  Server server(listen_on_loopback(), {}, true);
  TorchClient witness(server);
  Random random(test_seed(4));
  for (int turn = 0; turn < 200; ++turn) {
    CASE("turn %d", turn);
    TorchClient client(server);
    client.send(damaged(random));
    client.drain();
  }
  CHECK(witness.ask(request(TorchOp::kPing, "pid."), 4) == "pid.");
  CHECK(add_as_procgroup(server, "n", 1) == 1);
}

void a_server_that_does_not_answer_torch_closes_the_connection() {
  Server server(listen_on_loopback(), {});
  TorchClient client(server);
  CHECK(client.receive(1).empty());
  CHECK(server.requests() == 0 && server.clients() == 0);
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(clients_of_both_protocols_share_a_server);
  RUN_TEST(forgetting_closes_the_connections_and_clears_the_keys);
  RUN_TEST(clients_that_do_not_read_are_closed_beyond_the_bound);
  RUN_TEST(a_stream_of_requests_leaves_turns_to_others);
  RUN_TEST(garbage_closes_its_connection_alone);
  RUN_TEST(a_server_that_does_not_answer_torch_closes_the_connection);
  return 0;
}
