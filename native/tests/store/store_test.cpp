// A server and many clients as threads of one process, for the sanitizers.
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/store/store_fixture.hpp"

namespace {

using namespace procgroup;           // NOLINT
using namespace procgroup::store;    // NOLINT
using namespace procgroup::testing;  // NOLINT

constexpr int kClients = 8;
constexpr int kTurns = 50;
Client::Options options_for(const Server& server, const Identity& identity) {
  return {{"127.0.0.1"}, server.port(), identity, kJoins};
}

void work(const Server& server, const Identity& identity, int number) {
  Client client(options_for(server, identity), soon(), kNothing);
  for (int turn = 0; turn < kTurns; ++turn) {
    CASE("client %d, turn %d", number, turn);
    add(client, "total", 1);
    const std::string mine = "turn " + std::to_string(turn) + " of " + std::to_string(number);
    const std::string next = "turn " + std::to_string(turn) + " of " + std::to_string((number + 1) % kClients);
    set(client, mine, std::string(turn == 7 ? 200'000 : 10, static_cast<char>('a' + number)));
    const Reply reply = client.request(Op::kGet, key_only(next), {}, soon(), kNothing);
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

void a_deadline_withdraws_the_request() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  for (int i = 0; i < 3; ++i) {
    const Reply reply = client.request(Op::kGet, key_only("missing"), {}, Deadline::after(0.02), kNothing);
    CHECK(reply.status == Status::kCancelled);
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

Reply get_unless(Client& client, std::string_view unless, std::vector<std::string> keys, Deadline deadline) {
  return client.request(Op::kGetUnless, several_keys(keys) + key_only(unless), {}, deadline, kNothing);
}

// Clients end while others wait for their keys: each wait ends with the first key that was set for one of them.
void a_key_is_set_when_its_connection_ends() {
  Server server(listen_on_loopback(), {});
  std::vector<std::thread> waiters;
  for (int i = 0; i < kClients; ++i) {
    waiters.emplace_back([&] {
      Client client(options_for(server, {}), soon(), kNothing);
      const Reply reply = get_unless(client, "lost", {"of a", "of b"}, soon());
      CHECK(reply.status == Status::kUnless && (reply.body == "a" || reply.body == "b"));
    });
  }
  std::vector<std::thread> lost;
  for (const char* name : {"a", "b"}) {
    lost.emplace_back([&, name] {
      Client client(options_for(server, {}), soon(), kNothing);
      std::string head = key_only("lost");
      put_length(head, 1);
      CHECK(client.request(Op::kSetOnDisconnect, head, name, soon(), kNothing).status == Status::kOk);
      if (*name == 'a') set(client, "of a", "value");
      while (server.requests() < kClients + 3) std::this_thread::yield();
    });
  }
  for (std::thread& thread : lost) thread.join();
  for (std::thread& thread : waiters) thread.join();
}

void a_key_that_was_withdrawn_or_has_a_value_is_not_set() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  {
    Client other(options_for(server, {}), soon(), kNothing);
    for (const char* key : {"withdrawn", "has a value", "missing"}) {
      std::string head = key_only(key);
      put_length(head, 4);
      CHECK(other.request(Op::kSetOnDisconnect, head, "late", soon(), kNothing).status == Status::kOk);
    }
    CHECK(other.request(Op::kWithdrawOnDisconnect, key_only("withdrawn"), {}, soon(), kNothing).status == Status::kOk);
    set(client, "has a value", "first");
  }
  CHECK(get_unless(client, "missing", {"never"}, soon()).body == "late");
  CHECK(client.request(Op::kGet, key_only("has a value"), {}, soon(), kNothing).body == "first");
  CHECK(client.request(Op::kCheck, several_keys({"withdrawn"}), {}, soon(), kNothing).body.front() == 0);
}

void values_come_before_the_key_that_ends_the_wait() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  set(client, "unless", "u");
  CHECK(get_unless(client, "unless", {"k"}, soon()).status == Status::kUnless);
  set(client, "k", "v");
  const Reply reply = get_unless(client, "unless", {"k"}, soon());
  CHECK(reply.status == Status::kOk && BodyReader(reply.body).take_field() == "v");
  // A wait that was withdrawn, and one whose two keys come one after the other, leave nothing behind.
  CHECK(get_unless(client, "other", {"a", "b"}, Deadline::after(0.02)).status == Status::kCancelled);
  std::thread waiter([&] { CHECK(get_unless(client, "other", {"a", "b"}, soon()).status == Status::kOk); });
  set(client, "a", "1");
  set(client, "b", "2");
  waiter.join();
  set(client, "other", "x");
  CHECK(get_unless(client, "other", {"a", "other"}, soon()).status == Status::kOk);
}

void the_keys_of_a_connection_are_bounded() {
  Server server(listen_on_loopback(), {});
  Client client(options_for(server, {}), soon(), kNothing);
  for (size_t i = 0; i <= kMaxKeysOnDisconnect; ++i) {
    std::string head = key_only("key " + std::to_string(i));
    put_length(head, 0);
    const Status status = client.request(Op::kSetOnDisconnect, head, {}, soon(), kNothing).status;
    CHECK(status == (i < kMaxKeysOnDisconnect ? Status::kOk : Status::kError));
  }
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
  RUN_TEST(a_key_is_set_when_its_connection_ends);
  RUN_TEST(a_key_that_was_withdrawn_or_has_a_value_is_not_set);
  RUN_TEST(values_come_before_the_key_that_ends_the_wait);
  RUN_TEST(the_keys_of_a_connection_are_bounded);
  return 0;
}
