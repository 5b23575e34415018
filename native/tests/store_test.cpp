// A server and many clients as threads of one process, for the sanitizers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>
#include <vector>

#include "check.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace {

using namespace procgroup;         // NOLINT
using namespace procgroup::store;  // NOLINT

constexpr int kClients = 8;
constexpr int kTurns = 50;
const Check kNothing = [] {};

int listen_on_loopback() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(listener, 1024) == 0);
  return listener;
}

Client::Options options_for(const Server& server, const Identity& identity) {
  return {{"127.0.0.1"}, server.port(), identity, kJoins};
}

Deadline soon() { return Deadline::after(20); }

std::string key_only(std::string_view key) {
  std::string body;
  put_field(body, key);
  return body;
}

uint64_t add(Client& client, std::string_view key, uint64_t amount) {
  std::string body = key_only(key);
  put(body, amount);
  return BodyReader(client.request(Op::kAdd, body, {}, soon(), kNothing).body).take<uint64_t>();
}

void barrier(Client& client, std::string_view key, uint64_t size) {
  std::string body = key_only(key);
  put(body, size);
  CHECK(client.request(Op::kBarrier, body, {}, soon(), kNothing).status == Status::kOk);
}

void set(Client& client, std::string_view key, std::string_view value) {
  std::string head = key_only(key);
  put_length(head, value.size());
  CHECK(client.request(Op::kSet, head, value, soon(), kNothing).status == Status::kOk);
}

void work(const Server& server, const Identity& identity, int number) {
  Client client(options_for(server, identity), soon(), kNothing);
  for (int turn = 0; turn < kTurns; ++turn) {
    add(client, "total", 1);
    const std::string mine = "turn " + std::to_string(turn) + " of " + std::to_string(number);
    const std::string next = "turn " + std::to_string(turn) + " of " + std::to_string((number + 1) % kClients);
    set(client, mine, std::string(turn == 7 ? 200'000 : 10, static_cast<char>('a' + number)));
    const ServerReply reply = client.request(Op::kGet, key_only(next), {}, soon(), kNothing);
    CHECK(reply.body.front() == 'a' + (number + 1) % kClients);
    barrier(client, "turns", kClients);
  }
}

void many_clients_share_a_server(const Identity& identity) {
  Server server(listen_on_loopback(), identity);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) threads.emplace_back([&, i] { work(server, identity, i); });
  for (std::thread& thread : threads) thread.join();
  Client client(options_for(server, identity), soon(), kNothing);
  CHECK(add(client, "total", 0) == kClients * kTurns);
}

// Threads that share one client: those that wait do not hold up the one that ends their waiting.
void threads_share_a_client() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] { CHECK(client.request(Op::kGet, key_only("late"), {}, soon(), kNothing).body == "x"); });
  }
  set(client, "late", "x");
  for (std::thread& thread : threads) thread.join();
}

template <class Expected, class Function>
bool throws(Function&& function) {
  try {
    function();
  } catch (const Expected&) {
    return true;
  }
  return false;
}

void a_deadline_withdraws_the_request() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  for (int i = 0; i < 3; ++i) {
    CHECK(throws<DeadlinePassed>(
        [&] { client.request(Op::kGet, key_only("missing"), {}, Deadline::after(0.02), kNothing); }));
    CHECK(add(client, "n", 1) == static_cast<uint64_t>(i + 1));
  }
}

void another_key_is_refused() {
  Server server(listen_on_loopback(), {"", "secret"});
  CHECK(throws<ConnectFailure>([&] { Client(options_for(server, {"", "other"}), soon(), kNothing); }));
  CHECK(throws<ConnectFailure>([&] { Client(options_for(server, {}), soon(), kNothing); }));
  Server keyless(listen_on_loopback(), {});
  CHECK(throws<ConnectFailure>([&] { Client(options_for(keyless, {"", "secret"}), soon(), kNothing); }));
}

void a_stopped_server_ends_every_wait() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  std::thread waiter(
      [&] { CHECK(throws<ServerLost>([&] { client.request(Op::kGet, key_only("missing"), {}, soon(), kNothing); })); });
  while (server.requests() == 0) std::this_thread::yield();
  server.stop();
  waiter.join();
  CHECK(throws<ServerLost>([&] { add(client, "n", 1); }));
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  testing::run_test("many clients share a server", [] { many_clients_share_a_server({}); });
  testing::run_test("the same with a key", [] { many_clients_share_a_server({"job", "a key that both sides know"}); });
  RUN_TEST(threads_share_a_client);
  RUN_TEST(a_deadline_withdraws_the_request);
  RUN_TEST(another_key_is_refused);
  RUN_TEST(a_stopped_server_ends_every_wait);
  return 0;
}
