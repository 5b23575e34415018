// How the news of a failure spreads in a group: through shared memory, and by messages.
#include "group/failure_board.hpp"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/engine_fixture.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

constexpr uint64_t kGroup = 11;

GroupView everybody(int rank, int size) {
  GroupView group{kGroup, rank, {}};
  for (int member = 0; member < size; ++member) group.members.push_back(member);
  return group;
}

const Failure kTimeout = Timeout{.seconds = 2.5, .missing = {0, 3}};

void what_one_rank_posts_is_read_by_all() {
  for (const LinkKind kind : kLinkKinds) {
    run_ranks(4, kind, 64 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
      int news = 0;
      FailureBoard board(messages, everybody(rank, 4), [&] { ++news; });
      CHECK(!board.read(2));
      if (rank == 2) return board.post(kTimeout);
      pump_until(messages, doorbell, [&] { return news == 1; });
      const std::optional<Failure> read = board.read(2);
      CHECK(read && read->is<Timeout>() && read->as<Timeout>()->missing == kTimeout.as<Timeout>()->missing &&
            !board.read(1));
    });
  }
}

void a_rank_that_makes_the_group_later_reads_it_too() {
  std::atomic<bool> posted{false};
  run_ranks(2, LinkKind::kTcp, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
    if (rank == 0) {
      FailureBoard board(messages, everybody(rank, 2), [] {});
      board.post(kTimeout);
      pump_until(messages, doorbell, [&] { return messages.flushed(); });
      posted = true;
      return;
    }
    while (!posted) std::this_thread::yield();
    for (int turn = 0; turn < 100; ++turn) messages.pump();
    FailureBoard board(messages, everybody(rank, 2), [] {});
    pump_until(messages, doorbell, [&] { return board.read(0).has_value(); });
  });
}

void only_the_first_post_of_a_rank_counts_and_nonsense_is_a_failure() {
  run_ranks(2, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
    int news = 0;
    FailureBoard board(messages, everybody(rank, 2), [&] { ++news; });
    if (rank == 0) {
      messages.post(1, {kGroup, uint64_t{1} << 63 | 2}, std::vector<std::byte>(7, std::byte{0xff}));
      return board.post(kTimeout);
    }
    pump_until(messages, doorbell, [&] { return news == 1; });
    CHECK(board.read(0)->is<Broken>() && !board.read(0)->reason().empty());
  });
}

// Rank 2 never comes. Rank 0 gives up first; rank 1, which would wait for long, learns of it at once, as data.
void a_group_names_the_missing_ranks_of_a_call_that_another_rank_gave_up() {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 2}, {0, 1, 1}, {0, 1, 0}}) {
    CASE("%s", text_of(hosts).c_str());
    std::vector<Rank> world = make_world(3, ReadingRanges::for_this_processor(), procgroup::kTiny, hosts);
    std::atomic<int> present{0};
    in_all_ranks(world, [&](Group& group) {
      if (group.rank() == 2) return;
      for (++present; present != 2;) std::this_thread::yield();  // else rank 1 could be missing as well
      Request barrier;
      NoRuntime language;
      try {
        group.calls().run(barrier, group.rank() == 0 ? 1 : 60, language);
        check(false, "expected to fail", group.rank());
      } catch (const OperationFailed& failed) {
        const Failure& failure = failed.failure;
        if (group.rank() == 0) return check(failure.is<Timeout>(), "expected a timeout", 0);
        check(failure.is<Failed>() && failure.as<Failed>()->peer == 0, "expected the failure of rank 0", 1);
        check(failure.as<Failed>()->cause == FailureKind::kTimeout &&
                  failure.as<Failed>()->missing == std::vector<int>{2},
              "expected data", 1);
        check(failure.call.op == OpKind::kBarrier && failure.call.sequence == 1, "expected the call", 1);
      }
    });
  }
}

// A world whose ranks share no memory.
std::vector<Rank> make_world_of_sockets(int size) {
  std::vector<Rank> world(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank)
    world[static_cast<size_t>(rank)].engine =
        std::make_unique<Engine>(EngineOptions{.rank = rank, .world_size = size, .ranks_are_threads = true}, false);
  for (int first = 0; first < size; ++first) {
    for (int second = first + 1; second < size; ++second) {
      auto [one, other] = tcp_sockets();
      world[static_cast<size_t>(first)].engine->attach_socket(second, std::move(one), 100 + second);
      world[static_cast<size_t>(second)].engine->attach_socket(first, std::move(other), 100 + first);
    }
  }
  std::vector<int> members(world.size());
  std::iota(members.begin(), members.end(), 0);
  for (int rank = 0; rank < size; ++rank) {
    Rank& mine = world[static_cast<size_t>(rank)];
    mine.group =
        std::make_unique<Group>(*mine.engine, GroupOptions{.id = 7, .name = "test", .members = members, .rank = rank});
  }
  std::vector<uint64_t> offsets;
  for (const auto& rank : world) offsets.push_back(rank.group->members().offset());
  for (const auto& rank : world) rank.group->attach(offsets, members);  // each is on a host of its own
  return world;
}

Failure failure_of_barrier(Group& group) {
  Request barrier;
  NoRuntime language;
  try {
    group.calls().run(barrier, 60, language);
  } catch (const OperationFailed& failed) {
    return failed.failure;
  }
  check(false, "expected to fail", group.rank());
  std::abort();
}

// Rank 1 alone sees that rank 2 is lost, and leaves. Rank 0, which comes late, still names rank 2.
void a_late_rank_names_the_lost_rank_and_not_who_left_because_of_it() {
  std::vector<Rank> world = make_world_of_sockets(3);
  {
    Engine& engine = *world[1].engine;
    const std::lock_guard lock(engine.messages_mutex());
    engine.messages().fail_peer(2, Lost{.peer = 2, .pid = 102, .reason = "its process ended"});
  }
  const Failure first = failure_of_barrier(*world[1].group);
  check(first.is<Lost>() && first.culprit() == 2, "expected the loss", 1);
  world[1].group.reset();
  world[1].engine.reset();
  const Failure late = failure_of_barrier(*world[0].group);
  check(late.is<Lost>() && late.culprit() == 2 && late.as<Lost>()->pid == 102, late.summary().c_str(), 0);
  check(late.reason() == "its process ended", late.reason().c_str(), 0);
}

// An exception ends rank 1's program: with `at_once` also the call in which the others are.
void the_exception_that_ends_a_program_is_given_to_the_others_in_full() {
  const std::string text(3000, 'x');
  for (const bool shared : {true, false}) {
    CASE("shared memory %d", shared);
    std::vector<Rank> world = shared ? make_world(2) : make_world_of_sockets(2);
    world[1].engine->fail({.reason = text}, true);
    const Failure failure = failure_of_barrier(*world[0].group);
    check(failure.is<Failed>() && failure.as<Failed>()->peer == 1 && failure.as<Failed>()->reason == text,
          "expected the text", 0);
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(what_one_rank_posts_is_read_by_all);
  RUN_TEST(a_rank_that_makes_the_group_later_reads_it_too);
  RUN_TEST(only_the_first_post_of_a_rank_counts_and_nonsense_is_a_failure);
  RUN_TEST(a_group_names_the_missing_ranks_of_a_call_that_another_rank_gave_up);
  RUN_TEST(a_late_rank_names_the_lost_rank_and_not_who_left_because_of_it);
  RUN_TEST(the_exception_that_ends_a_program_is_given_to_the_others_in_full);
}
