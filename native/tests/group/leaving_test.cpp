// What a rank that leaves its group must not do: take away what others still read, or leave a waiter behind.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "group/group_operation.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

// Rank 1 ends the call and its group, while rank 0 has not read rank 1's data yet.
void what_was_published_stays(size_t count) {
  std::vector<Rank> world = make_world(2);
  const std::vector<const Arena*> arenas = arenas_of(world);
  CollectiveState states[2] = {state_of(world, 0, arenas), state_of(world, 1, arenas)};
  std::vector<int64_t> data[2] = {values(0, count), values(1, count)};
  Request requests[2] = {request_for(OpKind::kAllReduce, data[0]), request_for(OpKind::kAllReduce, data[1])};
  for (Request& request : requests) request.descriptor.sequence = 1;
  CollectiveCall slow(states[0], requests[0]);
  CollectiveCall fast(states[1], requests[1]);
  slow.advance();  // announces, with its data or its one chunk copied in
  check(fast.advance() == Progress::kDone, "expected to be done", 1);
  check(!slow.is_completed(), "expected to be slow", 0);
  world[1].group.reset();
  check(slow.advance() == Progress::kDone && slow.failure() == nullptr, "expected to end well", 0);
  for (size_t index = 0; index < count; ++index) check(data[0][index] == sum(2, index), "wrong number", 0);
}

const Failure* failure_after_leaving(Group& group, const std::shared_ptr<GroupOperation>& operation) {
  check(!operation->is_completed(), "expected to be pending", group.rank());
  group.leave();
  check(operation->is_completed() && operation->failure() != nullptr, "expected to have failed", group.rank());
  return operation->failure();
}

void leaving_ends_what_is_pending() {
  std::vector<Rank> world = make_world(2);
  Group& group = *world[0].group;
  std::vector<int64_t> in(4);
  std::vector<int64_t> data(4);
  const auto receive = group.messages().start({OpKind::kRecv, in.data(), in.size(), Dtype::kInt64, 1, 3}, 600);
  const auto first = group.calls().start(request_for(OpKind::kAllReduce, data), 600);
  const auto second = group.calls().start(request_for(OpKind::kAllReduce, data), 600);
  const Failure* failure = failure_after_leaving(group, receive);
  check(failure->summary() == "this rank left the group", failure->summary().c_str(), 0);
  check(first->is_completed() && second->is_completed(), "expected the queue to have ended", 0);
}

// The second call's limit passes while the first one waits: that must not start it.
void a_late_call_is_not_started_before_its_turn() {
  std::vector<Rank> world = make_world(2);
  Group& group = *world[0].group;
  std::vector<int64_t> data(4);
  const auto first = group.calls().start(request_for(OpKind::kAllReduce, data), 600);
  const auto second = group.calls().start(request_for(OpKind::kAllReduce, data), 0.1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!second->is_completed() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  check(second->is_completed() && second->failure()->is<Timeout>(), "expected a timeout", 0);
  check(second->call().sequence == 0, "expected a call without a number", 0);
  check(!first->is_completed() && !group.end().is_completed(), "expected the first call to go on", 0);
}

// Rank 0 cancels a group that it began to make. Ranks 1 and 2 may have received all handshakes and gone on, so rank 0's
// memory of the group is not reused before both have left.
void the_memory_of_a_group_that_was_not_made_is_no_other_groups() {
  const size_t bytes = GroupLayout::memory_bytes(3);
  std::vector<Rank> world = make_world(3);
  Engine& mine = *world[0].engine;
  auto group = std::make_unique<Group>(
      mine, GroupOptions{.id = 8, .name = "second", .members = {0, 1, 2}, .rank = 0, .layout = kTiny});
  const uint64_t offset = group->members().offset();
  const GroupMemoryView shown(mine.arena(), offset, 3, kTiny);
  NoRuntime language;
  try {
    group->handshake("new_group([0, 1, 2])", 0.05, language);
    check(false, "expected a timeout", 0);
  } catch (const OperationFailed& failed) {
    check(failed.failure.is<Timeout>(), "kind", 0);
  }
  group.reset();
  check(mine.heap().take(bytes) != offset, "expected the memory to be kept", 0);
  check(shown.memory().state.load() == MemberState::kFailed, "expected to be told why", 0);
  shown.departed(1).store(1);
  check(mine.heap().take(bytes) != offset, "expected the memory to be kept for rank 2", 0);
  shown.departed(2).store(1);
  check(mine.heap().take(bytes) == offset, "expected the memory to be used again", 0);
}

// The child does not have the memory that its parent shares with the others.
void a_forked_child_does_not_leave_the_groups_of_its_parent() {
  std::vector<Rank> world = make_world(2);
  const pid_t child = fork();
  if (child == 0) {
    CASE("a forked child destroys its copy of a group");
    world[0].group.reset();
    _exit(0);
  }
  int status = -1;
  check(waitpid(child, &status, 0) == child, "expected the child to have ended", 0);
  CHECK_EQUAL(status, 0);
  in_all_ranks(world, [](Group& group) {
    NoRuntime language;
    std::vector<int64_t> data = values(group.rank(), 4);
    Request request = request_for(OpKind::kAllReduce, data);
    group.calls().run(request, 60, language);
    CHECK_EQUAL(data[3], sum(2, 3));
  });
}

// Of the first of so many calls that fails.
Failure failure_of(Group& group, double seconds, int calls = 1) {
  NoRuntime language;
  std::vector<int64_t> data(4);
  for (int call = 0; call < calls; ++call) {
    Request request = request_for(OpKind::kAllReduce, data);
    try {
      group.calls().run(request, seconds, language);
    } catch (const OperationFailed& failed) {
      return failed.failure;
    }
  }
  check(false, "expected a failure", group.rank());
  std::abort();
}

// Rank 3 times out and leaves, and rank 0 leaves because of that; then rank 2 comes, and finds that both have left.
void the_last_rank_learns_the_first_failure() {
  std::vector<Rank> world = make_world(4);
  const Failure first = failure_of(*world[3].group, 0.01);
  check(first.is<Timeout>(), "expected a timeout", 3);
  for (const int rank : {3, 0}) {
    Rank& gone = world[static_cast<size_t>(rank)];
    if (rank == 0) check(failure_of(*gone.group, 600).culprit() == 3, "expected the loss of rank 3", 0);
    gone.group->leave();
    gone.engine->shutdown();
    while (world[2].engine->peer_status(rank) != PeerStatus::kLeft) std::this_thread::yield();
  }
  const Failure received = failure_of(*world[2].group, 600);
  check(received.is<Failed>() && received.culprit() == 3, received.summary().c_str(), 2);
  check(received.reason() == "its time limit of 0.01 s passed while it waited for ranks 0, 1, 2",
        received.reason().c_str(), 2);
}

// What the other ranks read of a member's end: how, why, and which calls it ends.
void the_end_of_a_member_is_read_in_one_place() {
  using How = MemberEnd::How;
  Descriptor first;
  first.sequence = 1;
  Descriptor second;
  second.sequence = 2;
  Descriptor message;
  message.op = OpKind::kSend;
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 0}}) {
    CASE("%s", text_of(hosts).c_str());
    std::vector<Rank> world = make_world(3, ReadingRanges::for_this_processor(), kTiny, hosts);
    const auto read = [&](int rank) {
      {
        const std::lock_guard lock(world[0].engine->messages_mutex());
        world[0].engine->pump();
      }
      return world[0].group->members().end_of(rank);
    };
    check(!read(1), "expected no end", 0);
    world[1].group->end().break_with(Broken{"no ink"}, second);
    const std::optional<MemberEnd> failed = read(1);
    check(failed && failed->how == How::kFailed && failed->why.culprit() == 1, "expected a failure", 0);
    check(failed->why.reason() == "no ink" && failed->why.relayed, failed->why.summary().c_str(), 0);
    check(!failed->ends(first) && failed->ends(second) && failed->ends(message), "of the second call on", 0);
    world[1].engine->fail({.reason = "ValueError: gone"}, true);
    const std::optional<MemberEnd> raised = read(1);
    check(raised && raised->how == How::kRaised && raised->ends(first), "expected its exception", 0);
    check(raised->why.reason() == "ValueError: gone" && raised->why.culprit() == 1, "expected its text", 0);
    world[2].engine->fail({.reason = "ValueError: later"}, false);
    const std::optional<MemberEnd> ending = read(2);
    check(ending && ending->how == How::kEnding && !ending->ends(message), "expected it to go on", 0);
    world[2].group->leave();
    const std::optional<MemberEnd> left = read(2);
    check(left && left->how == How::kLeft && left->ends(first), "expected it to have left", 0);
    check(left->why.reason() == "ValueError: later", left->why.summary().c_str(), 0);
  }
}

// Rank 0 has an error of its program where its next call would be, or, with a call of its own pending, somewhere: if it
// has published that call before, the other rank completes it, and its next call fails.
void an_error_ends_the_next_call(bool is_pending) {
  std::vector<Rank> world = make_world(2);
  Group& mine = *world[0].group;
  Group& other = *world[1].group;
  std::vector<int64_t> data[2] = {std::vector<int64_t>(4), std::vector<int64_t>(4)};
  std::shared_ptr<GroupOperation> pending;
  if (is_pending) pending = mine.calls().start(request_for(OpKind::kAllReduce, data[0]), 600);
  // The number of the given call is that of a call that has completed; the failure has that of the next one.
  mine.fail_call({.sequence = 7, .op = OpKind::kRankFirst, .root = 0}, "ValueError: made by the test");
  const Failure received = failure_of(other, 600, is_pending ? 2 : 1);
  check(received.is<Failed>() && received.culprit() == 0, received.summary().c_str(), 1);
  check(received.reason() == "ValueError: made by the test", received.reason().c_str(), 1);
  if (!is_pending) check(received.call.sequence == 1, "expected the number of the next call", 1);
  check(mine.end().is_completed(), "expected the group to have ended", 0);
  while (pending && !pending->is_completed()) std::this_thread::yield();
}

}  // namespace

int main() {
  RUN_TEST(the_last_rank_learns_the_first_failure);
  RUN_TEST(the_end_of_a_member_is_read_in_one_place);
  RUN_TEST(what_was_published_stays, 5);
  RUN_TEST(what_was_published_stays, 100);
  RUN_TEST(leaving_ends_what_is_pending);
  RUN_TEST(a_forked_child_does_not_leave_the_groups_of_its_parent);
  RUN_TEST(an_error_ends_the_next_call, false);
  RUN_TEST(an_error_ends_the_next_call, true);
  RUN_TEST(a_late_call_is_not_started_before_its_turn);
  RUN_TEST(the_memory_of_a_group_that_was_not_made_is_no_other_groups);
}
