// Deadlocks are found on every member of a cycle, and a message that still goes round is never mistaken for one.
#include "liveness/deadlock.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "group/group_operation.hpp"
#include "tests/check.hpp"
#include "tests/engine_fixture.hpp"

namespace procgroup {
namespace {

// Ranks that pass messages to the next one through counters.
struct Cycle {
  explicit Cycle(int size) : boards(static_cast<size_t>(size)), sent(static_cast<size_t>(size)) {}
  std::vector<WaitEdgeBoard> boards;
  std::vector<std::atomic<int>> sent;  // to each rank, and not yet read by it
  std::atomic<int> turns{0};
};

class Member final : public WaitForGraph {
 public:
  Member(Cycle& cycle, int rank) : cycle_(cycle), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(cycle_.boards.size()); }
  WaitEdgeBoard* own_board() override { return &cycle_.boards[static_cast<size_t>(rank_)]; }
  const WaitEdgeBoard* board(int rank) const override { return &cycle_.boards[static_cast<size_t>(rank)]; }
  bool is_quiet() override {
    const int came = cycle_.sent[static_cast<size_t>(rank_)].exchange(0, std::memory_order_acq_rel);
    unread_ += came;
    return came == 0;
  }

  // Receive from the rank before this one; the deadlock, if there is one.
  std::optional<Failure> receive() {
    DeadlockDetector watch(*this, 60, 0);
    const int before = (rank_ + world_size() - 1) % world_size();
    const auto awaited = [&]() -> std::optional<Awaited> {
      if (unread_ > 0) return std::nullopt;
      return Awaited{OpKind::kRecv, 0, {before}};
    };
    while (unread_ == 0) {
      if (std::optional<Failure> failure = watch.examine(awaited, [] { return true; })) return failure;
      std::this_thread::yield();  // to the rank that has the message, where there are fewer cores than ranks
    }
    --unread_;
    return std::nullopt;
  }
  bool has_unread() const { return unread_ > 0; }
  void send() { cycle_.sent[static_cast<size_t>((rank_ + 1) % world_size())].fetch_add(1, std::memory_order_acq_rel); }

 private:
  Cycle& cycle_;
  const int rank_;
  int unread_ = 0;
};

// One message goes round while every other rank waits for the one before it. The rank that drops it ends all.
Failure pass_on(Cycle& cycle, int rank, int turns) {
  Member member(cycle, rank);
  std::mt19937 random(static_cast<unsigned>(rank));
  if (rank == 0) member.send();
  for (;;) {
    if (std::optional<Failure> failure = member.receive()) {
      CHECK(cycle.turns.load() > turns);  // else it was a false alarm
      return *std::move(failure);
    }
    for (unsigned pause = random() % 4; pause > 0; --pause) std::this_thread::yield();
    if (cycle.turns.fetch_add(1) < turns) member.send();
  }
}

void test_a_message_that_goes_round_is_no_deadlock_and_its_loss_is_one(int size, int turns) {
  Cycle cycle(size);
  std::vector<Failure> failures(static_cast<size_t>(size), Aborted{});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      CASE("rank %d of %d", rank, size);
      failures[static_cast<size_t>(rank)] = pass_on(cycle, rank, turns);
    });
  for (std::thread& thread : threads) thread.join();
  for (const Failure& failure : failures) {
    CHECK(failure.is<Deadlock>());
    CHECK(failure.summary() == failures[0].summary());
    CHECK(failure.as<Deadlock>()->ranks.size() == static_cast<size_t>(size));
  }
}

class AloneRuntime final : public LanguageRuntime {
 public:
  void unlock() override {}
  void lock() override {}
  bool interrupted() override { return false; }
  bool alone() override { return true; }
};

void test_engines_find_a_cycle_of_receives() {
  std::vector<Rank> world = make_world(3);
  in_all_ranks(world, [](Group& group) {
    AloneRuntime language;
    int64_t value = 0;
    const int peer = (group.rank() + 1) % group.size();
    const MessageRequest request{OpKind::kRecv, &value, 1, Dtype::kInt64, peer, 0};
    try {
      group.messages().run(request, 60, language);
    } catch (const OperationFailed& failed) {
      check(failed.failure.summary() == "deadlock: rank 0 in recv from 1, rank 1 in recv from 2, rank 2 in recv from 0",
            failed.failure.summary().c_str(), group.rank());
      return;
    }
    check(false, "expected a deadlock", group.rank());
  });
}

constexpr size_t kLarge = 2 * kEagerBytes / sizeof(int64_t);

MessageRequest message(OpKind op, std::vector<int64_t>& data, int peer, uint64_t tag = 0) {
  return {op, data.data(), data.size(), Dtype::kInt64, peer, tag};
}

std::string failure_in_wait(Group& group, GroupOperation& operation) {
  AloneRuntime language;
  const CallQueue::Outcome outcome = group.calls().await(operation, Deadline::after(30), language);
  check(outcome.has_completed, "expected to have completed", group.rank());
  return outcome.failure ? outcome.failure->summary() : "nothing";
}

void test_engines_find_a_cycle_of_waits_for_messages(size_t count) {
  std::vector<Rank> world = make_world(2);
  in_all_ranks(world, [count](Group& group) {
    std::vector<int64_t> theirs(count), mine(kLarge);
    const int peer = 1 - group.rank();
    const auto receive = group.messages().start(message(OpKind::kRecv, theirs, peer, 1), 60);
    const auto send = group.messages().start(message(OpKind::kSend, mine, peer, 2), 60);
    const std::string failure = failure_in_wait(group, group.rank() == 0 ? *send : *receive);
    check(failure == "deadlock: rank 0 in send to 1 with tag 2, rank 1 in recv from 0 with tag 1", failure.c_str(),
          group.rank());
    // An operation that nobody waited for is not ended by the deadlock, and neither is the group.
    const std::shared_ptr<GroupOperation> other = group.rank() == 0 ? receive : send;
    check(!other->is_completed() && !group.end().is_completed(), "expected it to go on", group.rank());
    other->give_up(Aborted{});
  });
}

void test_engines_find_a_cycle_of_waits_for_collectives() {
  std::vector<Rank> world = make_world(3);
  in_all_ranks(world, [](Group& group) {
    std::vector<int64_t> data(kLarge);
    const auto operation = group.rank() == 0 ? group.calls().start(request_for(OpKind::kAllReduce, data), 60)
                                             : group.messages().start(message(OpKind::kRecv, data, 0), 60);
    const std::string failure = failure_in_wait(group, *operation);
    const bool is_deadlock = failure.find("deadlock: rank 0 in all_reduce #1, waiting for rank ") != std::string::npos;
    check(is_deadlock, failure.c_str(), group.rank());
  });
}

// Ranks that come late by more than the time after which a wait is examined, with receives of large messages pending.
void test_slow_exchanges_are_no_deadlock() {
  std::vector<Rank> world = make_world(3);
  in_all_ranks(world, [](Group& group) {
    std::mt19937 random(static_cast<unsigned>(group.rank()));
    const int size = group.size();
    for (int round = 0; round < 6; ++round) {
      CASE("round %d", round);
      std::vector<int64_t> mine(kLarge, group.rank()), from_left(kLarge), from_right(kLarge);
      const int left = (group.rank() + size - 1) % size;
      const int right = (group.rank() + 1) % size;
      std::vector<std::shared_ptr<GroupOperation>> operations;
      const auto start = [&](const MessageRequest& request) {
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 3 * 70));
        operations.push_back(group.messages().start(request, 60));
      };
      start(message(OpKind::kRecv, from_left, left, 1));
      start(message(OpKind::kSend, mine, right, 1));
      start(message(OpKind::kSend, mine, left, 2));
      start(message(OpKind::kRecv, from_right, right, 2));
      if (random() % 2 == 0) std::ranges::reverse(operations);
      for (const auto& operation : operations) {
        const std::string failure = failure_in_wait(group, *operation);
        check(failure == "nothing", failure.c_str(), group.rank());
      }
      check(from_left.back() == left && from_right.back() == right, "wrong values", group.rank());
    }
  });
}

void test_a_verdict_that_makes_no_sense_is_ignored() {
  WaitEdgeBoard board;
  CHECK(board.verdict().empty() && !board.wait(3));
  WaitEdge wait{.rank = 1, .next = 2, .op = static_cast<OpKind>(200), .number = 0, .epoch = 2};
  board.show(wait);
  board.announce({wait});
  CHECK(board.verdict().empty() && !board.wait(1));
  wait.op = OpKind::kRecv;
  board.announce({wait});
  CHECK(board.verdict().size() == 1 && board.verdict()[0].describe() == "recv from 2");
}

// A wait that shows another rank by now receives the verdict once it fails, or as long as it still awaits the
// rank that it showed then; a later call is not.
void test_a_verdict_is_for_the_call_that_it_was_found_of() {
  Cycle cycle(3);
  Member member(cycle, 0);
  const auto alone = [] { return true; };
  const auto awaits = [](int rank) {
    return [rank]() -> std::optional<Awaited> { return Awaited{OpKind::kBarrier, 1, {rank}}; };
  };
  {
    DeadlockDetector watch(member, 60, 0);
    CHECK(!watch.announced() && !watch.examine(awaits(1), alone));
    const WaitEdge mine = cycle.boards[0].wait(0).value();
    const WaitEdge theirs{.rank = 1, .next = 0, .op = OpKind::kRecv, .number = 0, .epoch = 2};
    cycle.boards[1].announce({mine, theirs});
    CHECK(watch.announced()->as<Deadlock>()->ranks == (std::vector<int>{0, 1}));
    cycle.boards[2].announce({theirs});  // of others
    const auto nothing = []() -> std::optional<Awaited> { return std::nullopt; };
    DeadlockDetector later(member, 60, 0);
    CHECK(!later.announced());
    CHECK(watch.examine(awaits(2), alone).has_value());  // before it would show the other rank
    cycle.boards[1].announce({});
    CHECK(!watch.examine(awaits(2), alone));
    cycle.boards[1].announce({mine, theirs});
    CHECK(!watch.examine(awaits(2), alone) && watch.announced().has_value());
    CHECK(watch.examine(awaits(1), alone).has_value());
    CHECK(!watch.examine(nothing, alone) && watch.announced().has_value());
  }
  DeadlockDetector later(member, 60, 0);
  CHECK(!later.announced() && !later.examine(awaits(1), alone) && !later.announced());
}

// The other rank sends and then shows its wait while this one is between its first look at the messages and its look at
// the others' waits. It sees this one's wait shown, and must not take it for one that it will not end.
void test_a_message_that_is_sent_during_a_look_is_no_deadlock() {
  Cycle cycle(2);
  Member receiver(cycle, 0);
  Member sender(cycle, 1);
  const auto alone = [] { return true; };
  DeadlockDetector sends(sender, 60, 0);
  const auto sender_awaits = []() -> std::optional<Awaited> { return Awaited{OpKind::kRecv, 0, {0}}; };
  bool sent = false;
  const auto receiver_awaits = [&]() -> std::optional<Awaited> {
    if (receiver.has_unread()) return std::nullopt;
    if (!std::exchange(sent, true)) {
      sender.send();
      CHECK(!sends.examine(sender_awaits, alone));
    }
    return Awaited{OpKind::kRecv, 0, {1}};
  };
  DeadlockDetector receives(receiver, 60, 0);
  CHECK(!receives.examine(receiver_awaits, alone));
  for (int look = 0; look < 10; ++look) {
    const std::optional<Failure> alarm = sends.examine(sender_awaits, alone);
    CHECK_EQUAL(alarm ? alarm->summary() : "no deadlock", "no deadlock");
  }
}

// Whoever drives the wait may look once more before it fails; meanwhile the others have failed and show nothing.
void test_who_found_a_deadlock_still_knows_it_when_the_others_have_gone() {
  Cycle cycle(2);
  Member finder(cycle, 0);
  Member other(cycle, 1);
  const auto alone = [] { return true; };
  const auto awaits = [](int rank) {
    return [rank]() -> std::optional<Awaited> { return Awaited{OpKind::kRecv, 0, {rank}}; };
  };
  DeadlockDetector watch(finder, 60, 0);
  std::optional<Failure> found;
  {
    DeadlockDetector theirs(other, 60, 0);
    for (int looks = 0; !found && looks < 10; ++looks) {
      CHECK(!theirs.examine(awaits(0), alone));
      found = watch.examine(awaits(1), alone);
    }
    CHECK(found.has_value());
  }
  CHECK(!cycle.boards[1].wait(1));
  const std::optional<Failure> again = watch.examine(awaits(1), alone);
  CHECK(again.has_value() && again->summary() == found->summary());
  CHECK(watch.announced().has_value());
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  RUN_TEST(test_a_verdict_that_makes_no_sense_is_ignored);
  RUN_TEST(test_a_verdict_is_for_the_call_that_it_was_found_of);
  RUN_TEST(test_a_message_that_is_sent_during_a_look_is_no_deadlock);
  RUN_TEST(test_who_found_a_deadlock_still_knows_it_when_the_others_have_gone);
  RUN_TEST(test_a_message_that_goes_round_is_no_deadlock_and_its_loss_is_one, 2, 300);
  RUN_TEST(test_a_message_that_goes_round_is_no_deadlock_and_its_loss_is_one, 3, 300);
  RUN_TEST(test_engines_find_a_cycle_of_receives);
  for (const size_t count : {size_t{1}, kLarge}) {
    CASE("%zu elements", count);
    RUN_TEST(test_engines_find_a_cycle_of_waits_for_messages, count);
  }
  RUN_TEST(test_engines_find_a_cycle_of_waits_for_collectives);
  RUN_TEST(test_slow_exchanges_are_no_deadlock);
}
