// Flight records: what a rank writes is what the others read, and what makes no sense in one is left out. The stack of
// a thread is taken whatever it does.
#include "runtime/flight_record.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "base/clock.hpp"
#include "runtime/observer.hpp"
#include "runtime/stack_sampler.hpp"
#include "tests/check.hpp"

using namespace procgroup;

namespace {

const RecordedRank kRank{3, 8, "job", "train.py --lr 1"};

std::string new_path() {
  char name[] = "/tmp/procgroup-record-XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  return std::string(name) + "/3-1.record";
}

void remove(const std::string& path) {
  unlink(path.c_str());
  rmdir(path.substr(0, path.rfind('/')).c_str());
}

std::unique_ptr<FlightRecord> open_record(const std::string& path) {
  return FlightRecord::attach(FileDescriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC)));
}

bool is_refused(const auto& step) {
  try {
    step();
    return false;
  } catch (const std::runtime_error&) {
    return true;
  }
}

Descriptor barrier(uint64_t sequence) {
  Descriptor call;
  call.group = 5;
  call.sequence = sequence;
  return call;
}

void a_record_outlives_its_process() {
  const std::string path = new_path();
  const pid_t child = fork();
  if (child == 0) {
    const auto record = FlightRecord::create(path, kRank);
    record->add_group({5, 1, 2, "pair", {3, 4}});
    const uint32_t line = record->add_source_line("/home/me/train.py:12");
    record->recorder().complete(record->recorder().begin(barrier(1), line));
    record->recorder().begin(barrier(2), line);
    record->set_stack("  File \"data.py\", line 88 in load\n");
    record->set_report("step 100");
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  const auto record = open_record(path);
  const FlightRecordView view = record->view();
  CHECK(view.rank().rank == 3 && view.rank().world_size == 8);
  CHECK(view.rank().job == "job" && view.rank().program == "train.py --lr 1");
  CHECK(view.pid() == child && !view.host().empty() && view.state() == RankState::kRunning);
  CHECK(view.beat_ns() <= now_ns() && view.beat_ns() >= view.created_ns());
  const std::vector<Record> calls = view.calls();
  CHECK(calls.size() == 2 && view.recorded() == 2);
  CHECK(calls[0].state == CallState::kCompleted && calls[1].state == CallState::kStarted);
  CHECK(view.source_line(calls[0].source) == "/home/me/train.py:12" && calls[0].source == calls[1].source);
  CHECK(calls[1].started_ns <= now_ns() && calls[1].started_ns >= view.created_ns() - 1'000'000);
  const std::vector<RecordedGroup> groups = view.groups();
  CHECK(groups.size() == 1 && groups[0].identity == 5 && groups[0].name == "pair" &&
        groups[0].members == std::vector<int>({3, 4}));
  CHECK(view.stack()->text == "  File \"data.py\", line 88 in load\n" && view.report()->text == "step 100");
  remove(path);
}

void the_members_of_a_group_are_kept_as_long_as_they_are_few_runs() {
  std::vector<int> columns;
  for (int rank = 7; rank < 100'000; rank += 8) columns.push_back(rank);
  std::vector<int> squares;
  for (int rank = 0; rank < 100; ++rank) squares.push_back(rank * rank);
  const std::vector<std::vector<int>> all{{},      {3},    {5, 4, 3}, {7, 3, 5, 6}, {0, 1, 2, 3, 8, 9, 10, 11},
                                          columns, squares};
  for (const std::vector<int>& members : all) {
    const auto record = FlightRecord::create("", kRank);
    record->add_group({5, 0, static_cast<int>(members.size()), "some", members});
    const std::vector<RecordedGroup> groups = record->view().groups();
    CHECK(groups.size() == 1 && groups[0].size == static_cast<int>(members.size()));
    CHECK(groups[0].members == (members == squares ? std::vector<int>{} : members));
  }
}

void moves_are_counted_by_group() {
  const auto record = FlightRecord::create("", kRank);
  const FlightRecordView view = record->view();
  CHECK(view.moves(5) == 0);
  record->note_move(5);
  const uint64_t once = view.moves(5);
  record->note_move(5);
  CHECK(once != 0 && view.moves(5) != once && view.moves(6) == 0);
}

void the_ranks_that_a_collective_waits_for_are_known_until_another_one_of_the_group_waits() {
  const auto record = FlightRecord::create("", kRank);
  const FlightRecordView view = record->view();
  CHECK(view.awaited(barrier(1)).count == 0);
  record->set_awaited(barrier(1), {2, 7});
  CHECK(view.awaited(barrier(1)).ranks == std::vector<int>({2, 7}) && view.awaited(barrier(1)).count == 2);
  CHECK(view.awaited(barrier(2)).count == 0);
  record->set_awaited(barrier(2), {0, 1, 2, 4, 5});
  CHECK(view.awaited(barrier(1)).count == 0);
  CHECK(view.awaited(barrier(2)).ranks.empty() && view.awaited(barrier(2)).count == 5);
}

void what_is_not_known_of_replays_is_told_apart_from_none() {
  const auto record = FlightRecord::create("", kRank);
  const FlightRecordView view = record->view();
  CHECK(view.replays(5) == RunningReplays{});  // nothing is known before the first write
  record->set_replays(5, {.calls = {3, 4}, .are_all = true});
  CHECK(view.replays(5) == (RunningReplays{.calls = {3, 4}, .are_all = true}));
  CHECK(view.replays(6) == RunningReplays{} && view.replays(5 + 16) == RunningReplays{});
  record->set_replays(5, {.calls = std::vector<uint64_t>(RunningReplays::kMost + 1, 3), .are_all = true});
  CHECK(view.replays(5) == RunningReplays{.calls = std::vector<uint64_t>(RunningReplays::kMost, 3)});
  for (uint64_t group = 6; group < 30; ++group) record->set_replays(group, {.are_all = true});
  CHECK(view.replays(20).are_all && !view.replays(21).are_all);  // there is room for 16 groups
  record->set_replays(6, {});
  record->set_replays(21, {.are_all = true});
  CHECK(view.replays(21).are_all && view.replays(5).calls.size() == RunningReplays::kMost);
}

void only_the_first_end_is_kept() {
  const auto record = FlightRecord::create("", kRank);
  record->end(RankState::kFailed, {.reason = "PeerLost: gone", .origin = FailureOrigin::kPeer, .peer = 3});
  record->end(RankState::kLeft);
  const RecordedFailure failure = record->view().failure();
  CHECK(record->view().state() == RankState::kFailed && failure.reason == "PeerLost: gone");
  CHECK(failure.origin == FailureOrigin::kPeer && failure.peer == 3);
}

void a_rank_holds_a_lock_on_its_record_while_it_lives() {
  const std::string path = new_path();
  auto record = FlightRecord::create(path, kRank);
  const FileDescriptor other(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  CHECK(flock(other.get(), LOCK_EX | LOCK_NB) != 0);
  record.reset();
  CHECK(flock(other.get(), LOCK_EX | LOCK_NB) == 0);
  remove(path);
}

void where_no_file_can_be_made_the_record_is_in_memory() {
  const auto record = FlightRecord::create("/nonexistent/directory/1.record", kRank);
  CHECK(record->descriptor() >= 0);
  record->recorder().begin(barrier(1));
  const auto theirs = FlightRecord::attach(FileDescriptor(dup(record->descriptor())));
  CHECK(theirs->view().calls().size() == 1);
}

void an_existing_file_is_never_written() {
  const std::string path = new_path();
  const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  CHECK(write(file, "mine", 4) == 4);
  close(file);
  const auto record = FlightRecord::create(path, kRank);
  struct stat found;
  CHECK(stat(path.c_str(), &found) == 0 && found.st_size == 4);
  remove(path);
}

void no_more_lines_than_there_is_room_for() {
  const auto record = FlightRecord::create("", kRank);
  for (size_t line = 1; line <= FlightRecord::kSourceLines; ++line)
    CHECK(record->add_source_line("train.py:" + std::to_string(line)) == line);
  CHECK(record->add_source_line("train.py:0") == 0);
  CHECK(record->view().source_line(512) == "train.py:512");
  CHECK(record->view().source_line(0).empty() && record->view().source_line(513).empty());
  const std::string path = std::string(500, 'x') + "/train.py:7";
  const auto other = FlightRecord::create("", kRank);
  CHECK(other->view().source_line(other->add_source_line(path)).ends_with("/train.py:7"));
}

void what_makes_no_sense_is_left_out() {
  const auto record = FlightRecord::create("", kRank);
  struct stat found;
  CHECK(fstat(record->descriptor(), &found) == 0);
  const auto bytes = static_cast<size_t>(found.st_size);
  std::vector<std::byte> copy(bytes, std::byte{0xfe});
  CHECK(pread(record->descriptor(), copy.data(), 16, 0) == 16);  // the magic and the version
  const FlightRecordView view(copy.data(), bytes);
  CHECK(view.calls().empty() && view.state() == RankState::kFailed);
  CHECK(view.failure().origin == FailureOrigin::kOwn);
  CHECK(view.stack()->text.size() <= 8192 && view.report()->text.size() <= 256);
  CHECK(view.source_line(1).size() <= 128 && view.groups().size() <= 128 && view.host().size() <= 64);
  for (const RecordedGroup& group : view.groups()) CHECK(group.name.size() <= 48 && group.members.empty());
  copy[0] = std::byte{0};
  CHECK(is_refused([&] { FlightRecordView(copy.data(), bytes); }));
  CHECK(is_refused([] { FlightRecord::attach(FileDescriptor(memfd_create("empty", MFD_CLOEXEC))); }));
}

void a_stopped_process_is_said_to_be_stopped() {
  const std::string path = new_path();
  const pid_t child = fork();
  if (child == 0) {
    const auto record = FlightRecord::create(path, kRank);
    kill(getpid(), SIGSTOP);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  CHECK(describe_stopped(open_record(path)->view()) == "stopped (SIGSTOP)");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(describe_stopped(open_record(path)->view()).empty());
  remove(path);
}

// As Python's faulthandler: writes the stack of the thread that runs it.
int stacks = -1;
void write_stack(int) {
  const std::string_view text = "  File \"/own/print.py\", line 7 in show\n  File \"data.py\", line 88 in load\n";
  CHECK(write(stacks, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

void the_stack_of_a_busy_thread_is_taken() {
  CHECK(StackSampler::of_process().sample(getpid()).empty());  // without a handler the signal would end the process
  stacks = memfd_create("stacks", MFD_CLOEXEC);
  signal(SIGRTMAX, write_stack);
  StackSampler::of_process().install(SIGRTMAX, stacks, "/own/");
  std::atomic<bool> stop{false};
  std::atomic<pid_t> number{0};
  std::thread busy([&] {
    number = static_cast<pid_t>(syscall(SYS_gettid));
    while (!stop) continue;
  });
  while (number == 0) std::this_thread::yield();
  const Deadline deadline = Deadline::after(20);
  for (int taken = 0; taken < 3;) {  // a thread that gets no core for 0.1 s has not answered
    taken += StackSampler::of_process().sample(number) == "  File \"data.py\", line 88 in load\n";
    CHECK(!deadline.passed());
  }
  stop = true;
  busy.join();
  CHECK(StackSampler::of_process().sample(number).empty());
}

void an_observer_takes_the_stack_when_it_is_asked() {
  const auto record = FlightRecord::create("", kRank);
  std::atomic<int> beats{0};
  Observer observer(*record, [&] { ++beats; });
  const int64_t asked = now_ns();
  const auto asking = FlightRecord::attach(FileDescriptor(dup(record->descriptor())));
  asking->request_stack();
  const Deadline deadline = Deadline::after(20);
  while (!record->view().stack() || record->view().beat_ns() < asked) CHECK(!deadline.passed());
  while (record->view().stack()->text.empty()) {  // the thread got no core for 0.1 s
    CHECK(!deadline.passed());
    asking->request_stack();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  CHECK(record->view().stack()->text == "  File \"data.py\", line 88 in load\n" && record->view().stack()->ns >= asked);
  while (beats < 3) CHECK(!deadline.passed());
  observer.stop();
}

void a_program_that_takes_the_signal_for_itself_is_not_disturbed() {
  signal(SIGRTMAX, SIG_DFL);
  CHECK(StackSampler::of_process().sample(getpid()).empty());
}

}  // namespace

int main() {
  testing::limit_seconds(60);
  RUN_TEST(a_record_outlives_its_process);
  RUN_TEST(the_members_of_a_group_are_kept_as_long_as_they_are_few_runs);
  RUN_TEST(moves_are_counted_by_group);
  RUN_TEST(the_ranks_that_a_collective_waits_for_are_known_until_another_one_of_the_group_waits);
  RUN_TEST(what_is_not_known_of_replays_is_told_apart_from_none);
  RUN_TEST(only_the_first_end_is_kept);
  RUN_TEST(a_rank_holds_a_lock_on_its_record_while_it_lives);
  RUN_TEST(where_no_file_can_be_made_the_record_is_in_memory);
  RUN_TEST(an_existing_file_is_never_written);
  RUN_TEST(no_more_lines_than_there_is_room_for);
  RUN_TEST(what_makes_no_sense_is_left_out);
  RUN_TEST(a_stopped_process_is_said_to_be_stopped);
  RUN_TEST(the_stack_of_a_busy_thread_is_taken);
  RUN_TEST(an_observer_takes_the_stack_when_it_is_asked);
  RUN_TEST(a_program_that_takes_the_signal_for_itself_is_not_disturbed);
}
