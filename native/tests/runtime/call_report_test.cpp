// What a rank is doing, in words: its running calls, or how long it has been in none.
#include "runtime/call_report.hpp"

#include "base/clock.hpp"
#include "tests/check.hpp"

using namespace procgroup;

namespace {

constexpr uint64_t kGroup = 5;
constexpr uint64_t kNamed = 6;

Record record(OpKind op, uint64_t sequence, CallState state, uint64_t group = kGroup, int64_t ended_ns = 0) {
  Record made{};
  made.call.group = group;
  made.call.op = op;
  made.call.dtype = Dtype::kFloat64;
  made.call.sequence = sequence;
  made.call.count = 4;
  made.call.root = op == OpKind::kRecv ? 1 : -1;
  made.state = state;
  made.ended_ns = ended_ns;
  return made;
}

std::string report(const std::vector<Record>& records) {
  return describe_calls(
      records, kGroup, [](uint64_t group) { return group == kNamed ? NamedGroup{"pair", {3, 4}} : NamedGroup{}; },
      [](uint32_t number) { return number == 7 ? "/home/me/train.py:12" : ""; },
      [](const Descriptor& call) {
        if (call.sequence == 21) return AwaitedRanks{{2, 5}, 2};
        return call.sequence == 22 ? AwaitedRanks{{}, 12} : AwaitedRanks{};
      });
}

void a_running_call_is_named_with_its_group_where_that_is_another() {
  const Record over = record(OpKind::kBarrier, 2, CallState::kCompleted, kGroup, 1);
  CHECK(report({over, record(OpKind::kRecv, 3, CallState::kStarted)}) == "in recv of 4 float64 from rank 1 (call #3)");
  CHECK(report({record(OpKind::kBarrier, 1, CallState::kStarted, kNamed)}) == "in barrier (call #1 on group pair)");
  CHECK(report({record(OpKind::kRecv, 1, CallState::kStarted, kNamed)}) ==
        "in recv of 4 float64 from rank 4 (rank 1 of the group) (call #1 on group pair)");
  CHECK(report({record(OpKind::kBarrier, 1, CallState::kStarted, 7)}) == "in barrier (call #1 on another group)");
}

void a_running_collective_is_described_with_the_ranks_that_it_waits_for() {
  CHECK(report({record(OpKind::kBarrier, 21, CallState::kStarted)}) == "in barrier (call #21, waiting for ranks 2, 5)");
  CHECK(report({record(OpKind::kBarrier, 22, CallState::kStarted, kNamed)}) ==
        "in barrier (call #22 on group pair, waiting for 12 ranks)");
  const Record over = record(OpKind::kBarrier, 21, CallState::kCompleted, kGroup, now_ns());
  CHECK(report({over}) == "in no call for 0.0 s; its last was barrier (call #21)");
}

void of_many_running_calls_the_oldest_are_named() {
  std::vector<Record> records;
  for (uint64_t sequence = 1; sequence <= 5; ++sequence)
    records.push_back(record(OpKind::kBarrier, sequence, CallState::kStarted));
  CHECK(report(records) == "in barrier (call #1) and barrier (call #2) and 3 more calls");
}

void a_rank_in_no_call_is_said_to_be_in_none() {
  CHECK(report({}) == "in no call, and has made none yet");
  CHECK(report({record(OpKind::kBarrier, 1, CallState::kFailed, kGroup, now_ns() - 12'000'000'000)}) ==
        "in no call for 12 s; its last was barrier (call #1)");
}

void a_call_is_named_with_the_line_of_the_program_that_made_it() {
  Record running = record(OpKind::kBarrier, 3, CallState::kStarted);
  running.source = 7;
  CHECK(report({running}) == "in barrier (call #3) at train.py:12");
  running.state = CallState::kCompleted;
  running.ended_ns = now_ns() - 12'000'000'000;
  CHECK(report({running}) == "in no call for 12 s; its last was barrier (call #3) at train.py:12");
}

void a_call_that_has_to_wait_for_its_turn_is_no_call_that_the_rank_is_in() {
  CHECK(report({record(OpKind::kBarrier, 0, CallState::kIssued)}) == "in no call, and has made none yet");
  CHECK(!is_in_call({record(OpKind::kBarrier, 0, CallState::kIssued)}));
  CHECK(is_in_call({record(OpKind::kBarrier, 1, CallState::kStarted)}));
}

void a_stack_is_described_by_its_innermost_frames() {
  CHECK(describe_stack("Current thread 0x00007f1c (most recent call first):\n"
                       "  File \"/home/me/data.py\", line 88 in load\n"
                       "  File \"train.py\", line 20 in <module>\n"
                       "  File \"runpy.py\", line 1 in run\n") ==
        "in load (data.py:88), called by <module> (train.py:20)");
  CHECK(describe_stack("  File \"/usr/lib/python3.11/threading.py\", line 324 in wait\n"
                       "  File \"/usr/lib/python3.11/threading.py\", line 622 in wait\n"
                       "  File \"train.py\", line 20 in main\n"
                       "  File \"train.py\", line 30 in <module>\n") ==
        "in wait (threading.py:324), called by main (train.py:20)");
  CHECK(describe_stack("  File \"/home/me/data.py\", line 88 in load") == "in load (data.py:88)");
  CHECK(describe_stack("  File \"/usr/lib/python3.11/threading.py\", line 324 in wait\n"
                       "  File \"/usr/lib/python3.11/queue.py\", line 3 in wait\n"
                       "  File \"/home/me/procgroup/train.py\", line 7 in main") ==
        "in wait (threading.py:324), called by main (train.py:7)");
  CHECK(describe_stack("").empty() && describe_stack("  File \"unfinished").empty());
}

}  // namespace

int main() {
  RUN_TEST(a_running_call_is_named_with_its_group_where_that_is_another);
  RUN_TEST(a_running_collective_is_described_with_the_ranks_that_it_waits_for);
  RUN_TEST(of_many_running_calls_the_oldest_are_named);
  RUN_TEST(a_rank_in_no_call_is_said_to_be_in_none);
  RUN_TEST(a_call_is_named_with_the_line_of_the_program_that_made_it);
  RUN_TEST(a_call_that_has_to_wait_for_its_turn_is_no_call_that_the_rank_is_in);
  RUN_TEST(a_stack_is_described_by_its_innermost_frames);
}
