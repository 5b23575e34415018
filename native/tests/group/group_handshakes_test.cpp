// What the members of a new group tell each other: two ranks in one thread, so that the test decides what comes when.
#include "group/group_handshakes.hpp"

#include <string>
#include <vector>

#include "runtime/failure_record.hpp"
#include "tests/messages/messages_fixture.hpp"

using namespace procgroup;
using namespace procgroup::testing;

namespace {

constexpr uint64_t kGroup = 77;
constexpr uint64_t kOther = 78;
constexpr int kWorld = 3000;

struct Ranks {
  void settle() {
    pair.settle();
    first.receive_arrived();
    second.receive_arrived();
    pair.settle();
  }
  void both_open(uint64_t identity) {
    first.open(identity, {0, 1}, 4096, "new_group([0, 1])");
    second.open(identity, {0, 1}, 8192, "new_group([0, 1])");
    settle();
  }
  Pair pair;
  GroupHandshakes first{pair.first, 0, kWorld};
  GroupHandshakes second{pair.second, 1, kWorld};
};

void members_exchange_the_offsets_of_their_memory() {
  Ranks ranks;
  ranks.first.open(kGroup, {0, 1}, 4096, "new_group([0, 1])");
  ranks.settle();
  CHECK(ranks.first.received(1, kGroup) == nullptr);
  CHECK(ranks.second.received(0, kGroup) == nullptr);  // nobody listens before making a group with that rank
  ranks.second.open(kGroup, {0, 1}, 8192, "new_group([1, 0])");
  ranks.settle();
  const GroupHandshake* of_second = ranks.first.received(1, kGroup);
  const GroupHandshake* of_first = ranks.second.received(0, kGroup);  // it had come before this rank made the group
  CHECK(of_second != nullptr && of_second->memory == 8192 && of_second->call == "new_group([1, 0])");
  CHECK(of_first != nullptr && of_first->memory == 4096 && of_first->call == "new_group([0, 1])");
  CHECK(of_first->identity == kGroup && !of_first->left && !of_first->ended);
  CHECK(ranks.first.received(1, kOther) == nullptr);
}

void several_groups_are_told_apart_in_any_order() {
  Ranks ranks;
  for (uint64_t identity = 1; identity <= 20; ++identity)
    ranks.first.open(identity, {0, 1}, identity * 64, "first " + std::to_string(identity));
  for (uint64_t identity = 20; identity >= 1; --identity)
    ranks.second.open(identity, {0, 1}, identity * 128, "second " + std::to_string(identity));
  ranks.settle();
  for (uint64_t identity = 1; identity <= 20; ++identity) {
    CHECK(ranks.second.received(0, identity)->memory == identity * 64);
    CHECK(ranks.first.received(1, identity)->memory == identity * 128);
    CHECK(ranks.first.received(1, identity)->call == "second " + std::to_string(identity));
  }
}

void a_member_that_leaves_in_order_says_so_when_it_is_asked_to() {
  Ranks ranks;
  ranks.both_open(kGroup);
  ranks.both_open(kOther);
  ranks.second.close(kGroup, nullptr, true, 7);
  ranks.second.close(kOther, nullptr, false);
  ranks.settle();
  CHECK(ranks.first.received(1, kGroup)->left && !ranks.first.received(1, kGroup)->ended);
  CHECK(ranks.first.received(1, kGroup)->last == 7);
  CHECK(!ranks.first.received(1, kOther)->left);
  CHECK(ranks.second.received(0, kGroup) == nullptr);  // what it has closed it has forgotten
}

void a_member_that_gives_up_says_why() {
  Ranks ranks;
  ranks.both_open(kGroup);
  const Failure failure = Timeout{.seconds = 2.5, .missing = {3, 1, 2}};
  ranks.second.close(kGroup, &failure, true);
  ranks.settle();
  const GroupHandshake* received = ranks.first.received(1, kGroup);
  CHECK(received->ended && received->ended->is<Timeout>() && received->ended_ns > 0 && !received->left);
  CHECK(received->ended->as<Timeout>()->seconds == 2.5 &&
        received->ended->as<Timeout>()->missing == (std::vector<int>{1, 2, 3}));
}

void the_process_that_was_lost_is_passed_on() {
  Ranks ranks;
  ranks.both_open(kGroup);
  const Failure failure = Lost{.peer = 4, .pid = 4242, .reason = "its process ended"};
  ranks.second.close(kGroup, &failure, true);
  ranks.settle();
  const Failure& ended = *ranks.first.received(1, kGroup)->ended;
  CHECK(ended.is<Lost>() && ended.as<Lost>()->peer == 4 && ended.as<Lost>()->pid == 4242);
  CHECK(ended.as<Lost>()->reason == "its process ended");
}

void long_words_are_cut_to_fit_and_every_missing_rank_is_named() {
  Ranks ranks;
  const std::string call(5000, 'x');
  ranks.first.open(kGroup, {0, 1}, 1, "first");
  ranks.second.open(kGroup, {0, 1}, 2, call);
  ranks.settle();
  const std::string received = ranks.first.received(1, kGroup)->call;
  CHECK(!received.empty() && received.size() < call.size() && call.starts_with(received));
  Timeout timeout{.reason = std::string(5000, 'y')};
  for (int rank = 0; rank < 3000; ++rank) timeout.missing.push_back(rank);
  const Failure failure(timeout);
  ranks.second.close(kGroup, &failure, true);
  ranks.settle();
  const Failure& ended = *ranks.first.received(1, kGroup)->ended;
  CHECK(ended.missing() == failure.missing() && ended.reason() == std::string(kFailureTextBytes, 'y'));
}

void a_member_that_is_far_ahead_is_held_back_and_nothing_is_lost() {
  constexpr uint64_t kBegin = 1000;
  constexpr uint64_t kMany = GroupHandshakes::kMostAhead + 50;
  Ranks ranks;
  ranks.both_open(kGroup);
  for (uint64_t identity = kBegin; identity < kBegin + kMany; ++identity) {
    ranks.second.open(identity, {0, 1}, identity * 64, "second");
    ranks.settle();
  }
  const auto received = [&] {
    uint64_t count = 0;
    while (ranks.first.received(1, kBegin + count) != nullptr) ++count;
    return count;
  };
  CHECK(received() == GroupHandshakes::kMostAhead);
  for (uint64_t identity = kBegin; identity < kBegin + 20; ++identity) ranks.first.open(identity, {0, 1}, 64, "first");
  ranks.settle();
  CHECK(received() == GroupHandshakes::kMostAhead + 20);
  for (uint64_t identity = kBegin; identity < kBegin + 20; ++identity) ranks.first.close(identity, nullptr, false);
  for (uint64_t identity = kBegin + 20; identity < kBegin + 50; ++identity) ranks.first.forget(1, identity);
  ranks.settle();
  CHECK(ranks.first.received(1, kBegin + kMany - 1) != nullptr);
}

void what_a_member_says_is_made_readable() {
  Ranks ranks;
  ranks.both_open(kGroup);
  ranks.second.open(kOther, {0, 1}, 2, "new\x80_\ngroup");
  const Failure failure = Mismatch{.reason = "\xff rank"};
  ranks.second.close(kGroup, &failure, true);
  ranks.settle();
  CHECK(ranks.first.received(1, kOther)->call == "new?_?group");
  CHECK(ranks.first.received(1, kGroup)->ended->reason() == "? rank");
}

void a_group_that_the_other_makes_alone_is_a_conflict() {
  Ranks ranks;
  ranks.both_open(kGroup);
  CHECK(ranks.first.conflicting(1, 0) == nullptr);
  ranks.second.open(kOther, {0, 1}, 2, "new_group([1, 0], sort_ranks=False)");
  ranks.settle();
  const GroupHandshake* conflict = ranks.first.conflicting(1, 0);
  CHECK(conflict != nullptr && conflict->identity == kOther);
  CHECK(conflict->call == "new_group([1, 0], sort_ranks=False)");
  ranks.first.open(kOther, {0, 1}, 1, "the same");
  CHECK(ranks.first.conflicting(1, 0) == nullptr);
}

void a_conflict_ends_when_it_was_reported_or_the_other_has_left() {
  Ranks ranks;
  ranks.both_open(kGroup);
  ranks.second.open(kOther, {0, 1}, 2, "reported");
  ranks.settle();
  ranks.first.forget(1, kOther);
  CHECK(ranks.first.conflicting(1, 0) == nullptr && ranks.first.received(1, kOther) == nullptr);
  ranks.second.open(kOther + 1, {0, 1}, 2, "left");
  ranks.second.close(kOther + 1, nullptr, true);
  ranks.settle();
  CHECK(ranks.first.received(1, kOther + 1)->left && ranks.first.conflicting(1, 0) == nullptr);
}

void a_cancelled_group_is_a_conflict_when_the_ranks_disagreed_since_then() {
  Ranks ranks;
  ranks.both_open(kGroup);
  const Failure disagreed = Mismatch{.reason = "other lists"};
  const Failure timed_out = Timeout{.seconds = 1};
  ranks.second.open(kOther, {0, 1}, 2, "cancelled for another reason");
  ranks.second.close(kOther, &timed_out, true);
  ranks.settle();
  CHECK(ranks.first.received(1, kOther)->ended && ranks.first.conflicting(1, 0) == nullptr);
  ranks.second.open(kOther + 1, {0, 1}, 2, "disagreed");
  ranks.second.close(kOther + 1, &disagreed, true);
  ranks.settle();
  const GroupHandshake* conflict = ranks.first.conflicting(1, 0);
  CHECK(conflict != nullptr && conflict->identity == kOther + 1);
  CHECK(ranks.first.conflicting(1, conflict->ended_ns + 1) == nullptr);
}

void a_peer_that_is_lost_is_silent_for_that_reason() {
  Ranks ranks;
  ranks.both_open(kGroup);
  ranks.second.open(kOther, {0, 1}, 64, "said before its end");
  ranks.pair.settle();
  CHECK(ranks.first.silenced(1) == nullptr);
  ranks.pair.first.fail_peer(1, Lost{.peer = 1, .pid = 99});
  ranks.first.receive_arrived();
  CHECK(ranks.first.silenced(1) != nullptr && ranks.first.silenced(1)->as<Lost>()->pid == 99);
  CHECK(ranks.first.received(1, kGroup)->memory == 8192);
  CHECK(ranks.first.received(1, kOther)->memory == 64);
  CHECK(ranks.first.silenced(0) == nullptr);
}

void the_end_of_a_group_that_nobody_knows_is_no_news() {
  Ranks ranks;
  ranks.both_open(kGroup);
  ranks.first.close(kGroup, nullptr, true);
  ranks.second.close(kGroup, nullptr, true);  // both at once: each has closed it when the other's word comes
  ranks.second.close(kGroup, nullptr, true);
  ranks.second.close(kOther, nullptr, true);
  ranks.settle();
  CHECK(ranks.first.received(1, kGroup) == nullptr && ranks.second.received(0, kGroup) == nullptr);
  ranks.both_open(kOther);
  CHECK(ranks.first.received(1, kOther)->memory == 8192 && !ranks.first.received(1, kOther)->left);
}

}  // namespace

int main() {
  limit_seconds(100);
  RUN_TEST(members_exchange_the_offsets_of_their_memory);
  RUN_TEST(several_groups_are_told_apart_in_any_order);
  RUN_TEST(a_member_that_leaves_in_order_says_so_when_it_is_asked_to);
  RUN_TEST(a_member_that_gives_up_says_why);
  RUN_TEST(the_process_that_was_lost_is_passed_on);
  RUN_TEST(long_words_are_cut_to_fit_and_every_missing_rank_is_named);
  RUN_TEST(a_member_that_is_far_ahead_is_held_back_and_nothing_is_lost);
  RUN_TEST(what_a_member_says_is_made_readable);
  RUN_TEST(a_group_that_the_other_makes_alone_is_a_conflict);
  RUN_TEST(a_conflict_ends_when_it_was_reported_or_the_other_has_left);
  RUN_TEST(a_cancelled_group_is_a_conflict_when_the_ranks_disagreed_since_then);
  RUN_TEST(a_peer_that_is_lost_is_silent_for_that_reason);
  RUN_TEST(the_end_of_a_group_that_nobody_knows_is_no_news);
}
