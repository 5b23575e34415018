// What a broken rank leaves in the memory that it shares: the others take it for no more than it is.
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/buffer_table.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr uint64_t kSequence = 1;

// Two ranks that make one call each, of which rank 1 has announced its own.
struct Calls {
  explicit Calls(size_t count)
      : data{values(0, count), values(1, count)},
        requests{request_for(OpKind::kAllReduce, data[0]), request_for(OpKind::kAllReduce, data[1])} {
    for (Request& request : requests) request.descriptor.sequence = kSequence;
    theirs.advance();
  }

  std::vector<Rank> world = make_world(2);
  std::vector<const Arena*> arenas = arenas_of(world);
  CollectiveState states[2] = {state_of(world, 0, arenas), state_of(world, 1, arenas)};
  std::vector<int64_t> data[2];
  Request requests[2];
  CollectiveCall mine{states[0], requests[0]};
  CollectiveCall theirs{states[1], requests[1]};
};

template <class Check>
void expect_out_of_range(Check check_that) {
  try {
    check_that();
  } catch (const std::out_of_range&) {
    return;
  }
  check(false, "expected to be refused", 0);
}

void a_descriptor_that_is_none_is_told_as_such() {
  for (const int byte : {2, 0x7f, 0xff}) {
    CASE("bytes %#x", byte);
    Calls calls(4);
    GroupMemoryView& shown = calls.states[1].mine();
    shown.announcement(kSequence).fingerprint += 1;
    std::memset(static_cast<void*>(&shown.descriptor(kSequence)), byte, sizeof(Descriptor));
    if (byte == 2) shown.descriptor(kSequence).op = OpKind::kAllReduce;  // the rest can be: but not the bool
    check(calls.mine.advance() == Progress::kDone, "expected a verdict", 0);
    const Failure* failure = calls.mine.failure();
    check(failure != nullptr && failure->is<Mismatch>(), "expected a mismatch", 0);
    const bool known = failure->as<Mismatch>()->calls[1] != "a call that this version does not know";
    check(known == (byte == 2), failure->as<Mismatch>()->calls[1].c_str(), 0);
  }
}

void the_header_of_a_buffer_table_may_have_any_bytes() {
  Calls calls(1000);
  const BufferTable table(calls.states[1].mine().small(kSequence), 2);
  std::memset(&table.head(), 0xfe, sizeof(BufferTableHeader));
  while (!calls.mine.is_completed() || !calls.theirs.is_completed()) {
    if (!calls.mine.is_completed()) calls.mine.advance();
    if (!calls.theirs.is_completed()) calls.theirs.advance();
  }
  check(calls.mine.failure() == nullptr && calls.data[0][999] == sum(2, 999), "expected the result", 0);
}

void small_areas_outside_of_the_arena_or_between_lines_end_the_call() {
  for (const uint64_t offset : {uint64_t{4096 + 8}, uint64_t{1} << 62, std::numeric_limits<uint64_t>::max() - 63}) {
    CASE("offset %#zx", offset);
    Calls calls(30);  // more than a line holds
    calls.states[1].mine().announcement(kSequence).small = offset;
    check(calls.mine.advance() == Progress::kDone, "expected an end", 0);
    const Failure* failure = calls.mine.failure();
    check(failure != nullptr && failure->is<Broken>(), "kind", 0);
    check(failure->as<Broken>()->reason.starts_with("it cannot go on: a peer named shared memory"),
          failure->as<Broken>()->reason.c_str(), 0);
    check(calls.data[0] == values(0, 30), "expected no output to be written", 0);
  }
}

void memory_that_has_a_form_begins_with_a_line() {
  const Arena arena = Arena::create(0);
  check(arena.at_line(4096, 64) == arena.at(4096, 64), "a line", 0);
  for (const uint64_t offset : {4097, 4096 + 8, 4096 + 63}) {
    CASE("offset %zu", offset);
    expect_out_of_range([&] { arena.at_line(offset, 1); });
  }
  expect_out_of_range([&] { arena.at_line(uint64_t{1} << 40, 1); });
  expect_out_of_range([&] { GroupMemoryView(arena, 4096 + 8, 2, kTiny); });
}

// Records that no correct rank writes: a cause that is no rank of the group, details outside of the arena, all ones.
void a_failure_record_in_shared_memory_is_checked_before_it_is_believed() {
  for (const int peer : {-7, 2, 99, -1}) {
    for (const uint64_t details : {uint64_t{0}, uint64_t{1} << 62, uint64_t{4096 + 3}}) {
      CASE("cause %d, details at %#zx", peer, details);
      std::vector<Rank> world = make_world(2);
      GroupMemory& theirs =
          GroupMemoryView(world[1].engine->arena(), world[1].group->members().offset(), 2, kTiny).memory();
      if (peer == -1) std::memset(static_cast<void*>(&theirs.failure), 0xff, sizeof theirs.failure);
      theirs.failure.peer = peer;
      theirs.failure_details = details;
      theirs.state.store(MemberState::kFailed);
      std::vector<int64_t> data(4);
      Request request = request_for(OpKind::kAllReduce, data);
      NoRuntime language;
      try {
        world[0].group->calls().run(request, 20, language);
        check(false, "expected a failure", 0);
      } catch (const OperationFailed& failed) {
        check(failed.failure.is<Failed>() && failed.failure.as<Failed>()->peer == 1, "kind, rank", 0);
        check(failed.failure.as<Failed>()->reason == "its failure record cannot be read",
              failed.failure.as<Failed>()->reason.c_str(), 0);
      }
    }
  }
}

// A rank announces a group with an invalid offset of its memory. A rank that makes the group names that rank, and
// records the failure in its own memory, which members that have gone on read.
void a_group_whose_memory_is_misplaced_is_not_made() {
  for (const uint64_t offset : {uint64_t{4096 + 8}, uint64_t{1} << 62}) {
    CASE("offset %#zx", offset);
    std::vector<Rank> world = make_world(2);
    Engine& theirs = *world[1].engine;
    {
      const std::lock_guard lock(theirs.messages_mutex());
      theirs.handshakes().open(8, {0, 1}, offset, "new_group([0, 1])");
    }
    Engine& mine = *world[0].engine;
    Group group(mine, GroupOptions{.id = 8, .name = "second", .members = {0, 1}, .rank = 0, .layout = kTiny});
    const GroupMemoryView memory(mine.arena(), group.members().offset(), 2, kTiny);
    NoRuntime language;
    try {
      group.handshake("new_group([0, 1])", 20, language);
      check(false, "expected to be refused", 0);
    } catch (const OperationFailed& failed) {
      check(failed.failure.is<Failed>() && failed.failure.as<Failed>()->peer == 1, "kind, rank", 0);
      check(failed.failure.as<Failed>()->reason.starts_with("a peer named shared memory"),
            failed.failure.as<Failed>()->reason.c_str(), 0);
    }
    check(memory.memory().state.load() == MemberState::kFailed, "expected to tell it", 0);
    const GroupMemory& shown = memory.memory();
    const size_t bytes = details_bytes(shown.failure);
    const auto posted = decode(shown.failure, {mine.arena().at(shown.failure_details, bytes), bytes}, 2);
    check(posted->as<Broken>()->reason.starts_with("rank 1 failed"), posted->as<Broken>()->reason.c_str(), 0);
  }
}

}  // namespace

int main() {
  RUN_TEST(a_descriptor_that_is_none_is_told_as_such);
  RUN_TEST(the_header_of_a_buffer_table_may_have_any_bytes);
  RUN_TEST(small_areas_outside_of_the_arena_or_between_lines_end_the_call);
  RUN_TEST(memory_that_has_a_form_begins_with_a_line);
  RUN_TEST(a_failure_record_in_shared_memory_is_checked_before_it_is_believed);
  RUN_TEST(a_group_whose_memory_is_misplaced_is_not_made);
}
