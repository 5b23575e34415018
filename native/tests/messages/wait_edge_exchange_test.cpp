// Deadlocks between ranks that share no memory: each is found on every member of the cycle, in the same words; a
// message that is still in flight is never mistaken for one; malformed messages change nothing.
#include "messages/wait_edge_exchange.hpp"

#include <poll.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "liveness/deadlock.hpp"
#include "tests/engine_fixture.hpp"
#include "tests/messages/messages_fixture.hpp"

namespace procgroup::testing {
namespace {

constexpr MessageKey kToken{9, 9};

// A rank that passes a token on to the next one, and suspects a deadlock at once.
class Member final : public WaitForGraph {
 public:
  Member(Messages& messages, int rank, int size)
      : messages_(messages), exchange_(messages, rank, size), rank_(rank), size_(size) {
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank) boards_[peer] = exchange_.add(peer);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return size_; }
  WaitEdgeBoard* own_board() override { return &own_; }
  const WaitEdgeBoard* board(int rank) const override { return rank == rank_ ? &own_ : boards_.at(rank); }
  bool is_quiet() override {
    while (messages_.pump()) {
    }
    return messages_.is_quiet();
  }
  void subscribe(int rank) override { exchange_.subscribe(rank); }
  void publish() override { exchange_.publish(own_); }
  void announce(const std::vector<WaitEdge>& cycle) override { exchange_.announce(cycle); }

  // The deadlock, if there is one.
  std::optional<Failure> receive(size_t bytes) {
    std::vector<std::byte> token(bytes);
    const int before = (rank_ + size_ - 1) % size_;
    const TransferPtr transfer = messages_.receive(before, kToken, token.data(), bytes);
    DeadlockDetector watch(*this, 60, 0);
    const auto awaited = [&]() -> std::optional<Awaited> {
      if (transfer->is_completed() || transfer->source >= 0) return std::nullopt;
      return Awaited{OpKind::kRecv, 0, {before}};
    };
    for (; !transfer->is_completed(); messages_.pump()) {
      if (std::optional<Failure> failure = watch.examine(awaited, [] { return true; })) {
        messages_.cancel(*transfer, *failure);
        return failure;
      }
      std::this_thread::yield();
    }
    CHECK(transfer->failure() == nullptr);
    return std::nullopt;
  }
  void send(size_t bytes) {
    const std::vector<std::byte> token(bytes);
    const TransferPtr transfer = messages_.send((rank_ + 1) % size_, kToken, token.data(), bytes);
    while (!transfer->is_completed()) messages_.pump();
  }

 private:
  Messages& messages_;
  WaitEdgeExchange exchange_;
  WaitEdgeBoard own_;
  std::map<int, const WaitEdgeBoard*> boards_;
  const int rank_;
  const int size_;
};

void a_token_that_goes_round_is_no_deadlock_and_its_loss_is_one(int size, size_t bytes, int turns, LinkKind kind) {
  std::atomic<int> passed{0};
  std::vector<Failure> failures(static_cast<size_t>(size), Aborted{});
  run_ranks(size, kind, 0, [&](int rank, Messages& messages, Doorbell&) {
    Member member(messages, rank, size);
    std::mt19937 random(static_cast<unsigned>(rank));
    if (rank == 0) member.send(bytes);
    for (;;) {
      if (std::optional<Failure> failure = member.receive(bytes)) {
        CHECK(passed > turns);  // else it was a false alarm
        failures[static_cast<size_t>(rank)] = *std::move(failure);
        return;
      }
      for (unsigned pause = random() % 4; pause > 0; --pause) std::this_thread::yield();
      if (passed.fetch_add(1) < turns) member.send(bytes);
    }
  });
  for (const Failure& failure : failures) {
    CHECK(failure.is<Deadlock>() && failure.as<Deadlock>()->ranks.size() == failures.size());
    CHECK(failure.summary() == failures[0].summary());
  }
}

void tokens_go_round_and_are_lost() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kUnixSocket})
    for (const int size : {2, 3, 5})
      for (const size_t bytes : {size_t{8}, kEagerBytes + 1}) {
        CASE("%d ranks, %zu bytes, over %s", size, bytes, link_name(kind));
        a_token_that_goes_round_is_no_deadlock_and_its_loss_is_one(size, bytes, 60, kind);
      }
}

std::vector<procgroup::Rank> make_world_of_sockets(int size) {
  std::vector<procgroup::Rank> world(static_cast<size_t>(size));
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  for (int rank = 0; rank < size; ++rank) {
    const EngineOptions options{.rank = rank, .world_size = size, .ranks_are_threads = true};
    world[static_cast<size_t>(rank)].engine = std::make_unique<Engine>(options, false);
    world[static_cast<size_t>(rank)].engine->set_cores(1, size);
  }
  for (int first = 0; first < size; ++first)
    for (int second = first + 1; second < size; ++second) {
      auto ends = tcp_sockets();
      world[static_cast<size_t>(first)].engine->attach_socket(second, std::move(ends.first), 1);
      world[static_cast<size_t>(second)].engine->attach_socket(first, std::move(ends.second), 1);
    }
  for (int rank = 0; rank < size; ++rank)
    world[static_cast<size_t>(rank)].group =
        std::make_unique<Group>(*world[static_cast<size_t>(rank)].engine,
                                GroupOptions{.id = 7, .name = "test", .members = members, .rank = rank});
  std::vector<uint64_t> offsets;
  for (const auto& rank : world) offsets.push_back(rank.group->members().offset());
  for (const auto& rank : world) rank.group->attach(offsets, members);  // each is on a host of its own
  return world;
}

class AloneRuntime final : public LanguageRuntime {
 public:
  void unlock() override {}
  void lock() override {}
  bool interrupted() override { return false; }
  bool alone() override { return true; }
};

std::string failure_in(const std::function<void(LanguageRuntime&)>& call) {
  AloneRuntime language;
  try {
    call(language);
  } catch (const OperationFailed& failed) {
    return failed.failure.summary();
  }
  return "nothing";
}

std::string failure_in_receive(Group& group, int from) {
  int64_t value = 0;
  const MessageRequest request{OpKind::kRecv, &value, 1, Dtype::kInt64, from, 0};
  return failure_in([&](LanguageRuntime& language) { group.messages().run(request, 60, language); });
}

void engines_find_cycles_of_receives_and_collectives() {
  std::vector<procgroup::Rank> world = make_world_of_sockets(3);
  in_all_ranks(world, [](Group& group) {
    const std::string received = failure_in_receive(group, (group.rank() + 1) % group.size());
    check(received == "deadlock: rank 0 in recv from 1, rank 1 in recv from 2, rank 2 in recv from 0", received.c_str(),
          group.rank());
  });
  const std::string cycle = "deadlock: rank 0 in all_reduce #1, waiting for rank 1, rank 1 in recv from 0";
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data(4);
    Request request = request_for(OpKind::kAllReduce, data);
    const std::string received =
        group.rank() == 1 ? failure_in_receive(group, 0)
                          : failure_in([&](LanguageRuntime& language) { group.calls().run(request, 60, language); });
    const std::string expected = group.rank() == 2 ? "rank 0 failed: " + cycle : cycle;
    check(received == expected, received.c_str(), group.rank());
  });
}

// The failure notification of a call is written before the call returns: its rank may make no other one.
void the_failure_of_a_rank_that_makes_no_other_call_arrives() {
  for (const bool asynchronous : {false, true}) {
    CASE("asynchronous %d", asynchronous);
    std::vector<procgroup::Rank> world = make_world_of_sockets(3);
    in_all_ranks(world, [&](Group& group) {
      if (group.rank() == 2) return;
      std::vector<int64_t> data(4);
      Request request = request_for(OpKind::kAllReduce, data);
      if (group.rank() == 0) {
        const std::string received = failure_in([&](LanguageRuntime& language) {
          if (!asynchronous) return group.calls().run(request, 0.2, language);
          const auto operation = group.calls().start(request, 0.2);
          while (!operation->is_completed()) poll(nullptr, 0, 5);
          throw OperationFailed{*operation->failure(), operation->call()};
        });
        check(received.find("0.2") != std::string::npos, received.c_str(), 0);
      } else {
        poll(nullptr, 0, 400);
        const int64_t began = now_ns();
        const std::string received =
            failure_in([&](LanguageRuntime& language) { group.calls().run(request, 20, language); });
        check(received.find("rank 0 failed") != std::string::npos, received.c_str(), 1);
        CHECK(now_ns() - began < 5'000'000'000);
      }
    });
  }
}

struct WireMessage {  // as WaitEdgeExchange sends it
  uint32_t kind;
  uint32_t waits;
  uint64_t confirmed;
  uint64_t sequence;
  uint64_t replay;
  struct {
    int32_t rank, next;
    uint64_t op, number, epoch;
    char line[WaitEdgeBoard::kLineBytes];
  } wait[2];
};

void malformed_messages_change_nothing() {
  constexpr MessageKey key{0, uint64_t{1} << 63 | 1};
  Pair pair;
  WaitEdgeExchange exchange(pair.first, 0, 2);
  const WaitEdgeBoard* board = exchange.add(1);
  constexpr auto kRecv = static_cast<uint64_t>(OpKind::kRecv);
  const WireMessage good{1, 1, 4, 0, 0, {{1, 0, kRecv, 0, 6, {}}, {}}};
  const WireMessage cycle{3, 2, 0, 0, 0, {{1, 0, kRecv, 0, 6, "one.py:3"}, {0, 1, kRecv, 0, 2, "two.py:\n4"}}};
  const auto post = [&](const WireMessage& sent, size_t bytes) {
    Bytes message(sizeof sent);
    std::memcpy(message.data(), &sent, sizeof sent);
    message.resize(bytes);
    const auto* begin = reinterpret_cast<const std::byte*>(message.data());
    pair.second.post(0, key, std::vector<std::byte>(begin, begin + bytes));
    pair.settle();
  };
  const size_t one = sizeof good - sizeof good.wait[1];
  for (const size_t bytes : {size_t{0}, size_t{3}, one - 1, one + 1, size_t{kEagerBytes}}) post(good, bytes);
  const auto changed = [&](auto change) {
    WireMessage message = good;
    change(message);
    post(message, one);
  };
  changed([](WireMessage& message) { message.kind = 77; });
  changed([](WireMessage& message) { message.waits = ~0U; });
  changed([](WireMessage& message) { message.wait[0].rank = 0; });
  changed([](WireMessage& message) { message.wait[0].next = 1; });
  changed([](WireMessage& message) { message.wait[0].next = 2; });
  changed([](WireMessage& message) { message.wait[0].next = -1; });
  changed([](WireMessage& message) { message.wait[0].op = static_cast<uint64_t>(kMakesGroup) + 1; });
  changed([](WireMessage& message) { message.wait[0].op = uint64_t{1} << 40; });
  changed([](WireMessage& message) { message.wait[0].epoch = 7; });
  CHECK(!board->wait(1) && board->verdict().empty());
  post(good, one);
  CHECK(board->wait(1) && board->wait(1)->epoch == 6 && board->confirmed() == 4);
  WireMessage open = cycle;
  open.wait[1].rank = 1;
  open.wait[1].next = 0;
  post(open, sizeof open);
  CHECK(board->verdict().empty());
  post(cycle, sizeof cycle);
  CHECK(board->verdict().size() == 2 && board->verdict()[0].describe() == "recv from 0 at one.py:3");
  CHECK(board->verdict()[1].describe().find('\n') == std::string::npos);
  // A large message is dropped, and later messages still arrive.
  const Bytes large(kEagerBytes + 1);
  const TransferPtr announced = pair.second.send(0, key, large.data(), large.size());
  post({2, 0, 0, 0, 0, {}}, sizeof good - sizeof good.wait);
  CHECK(!board->wait(1));
  pair.second.cancel(*announced, kCancelled);
  pair.settle();
}

void a_subscriber_receives_the_wait_until_it_ends() {
  Pair pair;
  WaitEdgeExchange here(pair.first, 0, 2);
  WaitEdgeExchange there(pair.second, 1, 2);
  WaitEdgeBoard own;
  here.add(1);
  const WaitEdgeBoard* copy = there.add(0);
  own.show({.rank = 0, .next = 1, .op = OpKind::kSend, .number = 3, .epoch = 0, .line = "train.py:12"});
  here.publish(own);
  pair.settle();
  CHECK(!copy->wait(0));  // there was no subscriber
  there.subscribe(0);
  pair.settle();
  here.publish(own);
  pair.settle();
  CHECK(copy->wait(0) && copy->wait(0)->describe() == "send to 1 with tag 3 at train.py:12" && copy->confirmed() == 0);
  own.confirm(8);
  here.publish(own);
  pair.settle();
  CHECK(copy->confirmed() == 8 && copy->wait(0)->epoch == own.epoch());
  own.hide();
  here.publish(own);
  pair.settle();
  CHECK(!copy->wait(0));
}

WaitEdgeExchange::Answer in_barrier(uint64_t group, uint64_t /*captured*/) {
  return {"in barrier of group " + std::to_string(group)};
}

void the_last_answer_counts_until_the_next_one_comes() {
  Pair pair;
  WaitEdgeExchange here(pair.first, 0, 2);
  WaitEdgeExchange there(pair.second, 1, 2);
  here.add(1);
  there.add(0);
  here.query_calls(1, 7);
  pair.settle();
  CHECK(!here.has_answered(1) && here.calls(1).empty());
  there.answer(in_barrier);
  pair.settle();
  CHECK(here.has_answered(1) && here.calls(1) == "in barrier of group 7");
  poll(nullptr, 0, 250);  // the same query again so soon would have no effect
  here.query_calls(1, 7);
  pair.settle();
  CHECK(!here.has_answered(1) && here.calls(1) == "in barrier of group 7");
  poll(nullptr, 0, 900);
  CHECK(here.calls(1).empty());  // it is too old
  here.query_calls(1, 8);
  pair.settle();
  poll(nullptr, 0, 60);  // a peer answers no faster
  there.answer([](uint64_t, uint64_t) { return WaitEdgeExchange::Answer{"in no call"}; });
  pair.settle();
  CHECK(here.has_answered(1) && here.calls(1) == "in no call");
  here.query_calls(1, 7);
  CHECK(!here.has_answered(1) && here.calls(1).empty());  // the answer was about another group
}

// Whether a replay runs is known of the captured call that was queried last, and only while the peer says so.
void an_answer_tells_whether_a_replay_of_a_call_runs() {
  Pair pair;
  WaitEdgeExchange here(pair.first, 0, 2);
  WaitEdgeExchange there(pair.second, 1, 2);
  here.add(1);
  there.add(0);
  const auto runs_call_5 = [](uint64_t, uint64_t captured) -> WaitEdgeExchange::Answer {
    if (captured == 6) return {"in no call"};  // and of this one it does not know
    return {"in no call", captured == 5};
  };
  const std::pair<uint64_t, std::optional<bool>> expected[] = {{5, true}, {4, false}, {6, std::nullopt}, {5, true}};
  CHECK(!here.runs_replay(1));
  for (const auto& [captured, runs] : expected) {
    here.query_calls(1, 7, captured);
    CHECK(!here.has_answered(1) && !here.runs_replay(1));
    pair.settle();
    there.answer(runs_call_5);
    pair.settle();
    CHECK(here.has_answered(1) && here.runs_replay(1) == runs);
    poll(nullptr, 0, 60);  // a peer answers no faster
  }
}

void an_answer_counts_for_its_own_query_only() {
  Pair pair;
  WaitEdgeExchange here(pair.first, 0, 2);
  WaitEdgeExchange there(pair.second, 1, 2);
  here.add(1);
  there.add(0);
  here.query_calls(1, 7);
  pair.settle();
  there.answer(in_barrier);
  here.query_calls(1, 8);  // before the answer to the first query has come
  pair.settle();
  CHECK(!here.has_answered(1) && here.calls(1).empty());
  poll(nullptr, 0, 60);  // a peer answers no faster
  there.answer(in_barrier);
  pair.settle();
  CHECK(here.has_answered(1) && here.calls(1) == "in barrier of group 8");
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(malformed_messages_change_nothing);
  RUN_TEST(a_subscriber_receives_the_wait_until_it_ends);
  RUN_TEST(the_last_answer_counts_until_the_next_one_comes);
  RUN_TEST(an_answer_counts_for_its_own_query_only);
  RUN_TEST(an_answer_tells_whether_a_replay_of_a_call_runs);
  RUN_TEST(tokens_go_round_and_are_lost);
  RUN_TEST(engines_find_cycles_of_receives_and_collectives);
  RUN_TEST(the_failure_of_a_rank_that_makes_no_other_call_arrives);
}
