// The recorder: what is written is what is read, also while it is written, by several threads.
#include "runtime/recorder.hpp"

#include <sys/mman.h>
#include <sys/wait.h>

#include <cstring>
#include <memory>
#include <thread>

#include "base/clock.hpp"
#include "tests/check.hpp"

namespace procgroup {
namespace {

class Memory {
 public:
  Memory() : address_(mmap(nullptr, Recorder::bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    CHECK(address_ != MAP_FAILED);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(address_, Recorder::bytes()); }
  void* get() const { return address_; }

 private:
  void* address_;
};

// Every field follows from the number, so that a mixture of two calls is seen.
Descriptor call_number(uint64_t number) {
  Descriptor call;
  call.group = number * 3;
  call.sequence = number;
  call.op = static_cast<OpKind>(number % 7);
  call.dtype = static_cast<Dtype>(number % kDtypes);
  call.reduce_op = static_cast<ReduceOp>(number % kReduceOps);
  call.root = static_cast<int32_t>(number % 1000) - 1;
  call.count = number * 5;
  return call;
}

bool is_whole(const Record& record) {
  const Descriptor want = call_number(record.call.sequence);
  const Descriptor& got = record.call;
  return got.group == want.group && got.op == want.op && got.dtype == want.dtype && got.reduce_op == want.reduce_op &&
         got.root == want.root && got.count == want.count;
}

void a_call_is_read_as_it_was_written() {
  const Memory memory;
  Recorder recorder(memory.get());
  CHECK(recorder.read().empty());
  const int64_t before = now_ns();
  const uint64_t first = recorder.begin(call_number(41));
  recorder.complete(first);
  const uint64_t second = recorder.begin(call_number(42));
  const uint64_t third = recorder.begin(call_number(43));
  recorder.fail(third);
  const std::vector<Record> records = recorder.read();
  const int64_t after = now_ns();
  CHECK(records.size() == 3);
  for (const Record& record : records) CHECK(is_whole(record));
  CHECK(records[0].call.sequence == 41 && records[0].state == CallState::kCompleted && records[0].ended_ns != 0);
  CHECK(records[1].state == CallState::kStarted && records[1].started_ns != 0 && records[1].ended_ns == 0);
  CHECK(records[2].state == CallState::kFailed && std::strcmp(call_state_name(records[2].state), "failed") == 0);
  constexpr int64_t kTolerance = 1'000'000;
  CHECK(records[0].started_ns > before - kTolerance && records[2].ended_ns < after + kTolerance);
  CHECK(records[0].started_ns <= records[0].ended_ns && records[0].ended_ns <= records[1].started_ns);
  recorder.complete(second);
  CHECK(recorder.read()[1].state == CallState::kCompleted && recorder.read()[1].ended_ns != 0);
  for (int times = 0; times < 9; ++times) recorder.complete(first), recorder.fail(first);
  CHECK(recorder.read()[0].state == CallState::kCompleted);
}

void times_agree_with_the_monotonic_clock() {
  const Memory memory;
  Recorder recorder(memory.get());
  const int64_t before = now_ns();
  const uint64_t index = recorder.begin(call_number(1));
  timespec time{0, 20'000'000};
  nanosleep(&time, nullptr);
  recorder.complete(index);
  const int64_t passed = now_ns() - before;
  const Record record = recorder.read().at(0);
  const int64_t recorded = record.ended_ns - record.started_ns;
  CHECK(recorded >= 19'900'000 && recorded <= passed + 100'000);
}

void an_issued_call_starts_when_it_has_its_turn() {
  const Memory memory;
  Recorder recorder(memory.get());
  const uint64_t index = recorder.issue(call_number(0), 7);
  const Record issued = recorder.read().at(0);
  CHECK(issued.state == CallState::kIssued && issued.source == 7);
  CHECK(issued.issued_ns != 0 && issued.started_ns == 0 && issued.ended_ns == 0);
  timespec time{0, 2'000'000};
  nanosleep(&time, nullptr);
  CHECK(recorder.start(index, call_number(42), 7) == index);
  const Record started = recorder.read().at(0);
  CHECK(started.state == CallState::kStarted && started.source == 7 && is_whole(started));
  CHECK(started.started_ns - started.issued_ns >= 1'900'000 && started.issued_ns >= issued.issued_ns - 100'000);
  recorder.queue(index);
  CHECK(recorder.read().at(0).state == CallState::kQueued && recorder.read().at(0).ended_ns == 0);
  recorder.complete(index);
  for (int times = 0; times < 3; ++times) recorder.queue(index);
  CHECK(recorder.read().at(0).state == CallState::kCompleted);
  CHECK(recorder.read().size() == 1 && Recorder::recorded(memory.get()) == 1);
}

void an_issued_call_that_the_ring_has_lost_is_added_again() {
  const Memory memory;
  Recorder recorder(memory.get());
  const uint64_t lost = recorder.issue(call_number(0));
  for (uint64_t number = 1; number <= Recorder::kEntries; ++number) recorder.begin(call_number(number));
  const uint64_t index = recorder.start(lost, call_number(9000), 3);
  CHECK(index != lost && recorder.read().back().call.sequence == 9000 && recorder.read().back().source == 3);
}

void the_ring_keeps_the_last_calls() {
  const Memory memory;
  Recorder recorder(memory.get());
  const uint64_t overtaken = recorder.begin(call_number(0));
  for (uint64_t number = 1; number < 4000; ++number) recorder.begin(call_number(number));
  recorder.fail(overtaken);
  const std::vector<Record> records = recorder.read();
  CHECK(records.size() == Recorder::kEntries);
  for (size_t i = 0; i < records.size(); ++i) {
    CHECK(records[i].index == 4000 - Recorder::kEntries + i && records[i].call.sequence == records[i].index);
    CHECK(records[i].state == CallState::kStarted && is_whole(records[i]));
  }
}

void check_read_while_written(const Record& record) {
  CHECK(is_whole(record));
  CHECK((record.ended_ns != 0) == (record.state >= CallState::kCompleted));
  CHECK(record.started_ns != 0);
  CHECK(record.state != CallState::kFailed || record.call.sequence % 5 == 0);
}

void a_reader_never_sees_a_mixture() {
  const Memory memory;
  Recorder recorder(memory.get());
  std::atomic<bool> enough{false};
  std::atomic<uint64_t> written{0};
  const auto write = [&](uint64_t from) {
    for (uint64_t number = from; !enough.load(); ++number) {
      const uint64_t index = recorder.begin(call_number(number));
      number % 5 == 0 ? recorder.fail(index) : recorder.complete(index);
      ++written;
    }
  };
  std::thread one(write, 0);
  std::thread other(write, 1'000'000'000);
  for (size_t seen = 0; seen < 20'000 || written < 2 * Recorder::kEntries;) {
    for (const Record& record : Recorder::read(memory.get(), ClockPair::now())) {
      check_read_while_written(record);
      ++seen;
    }
  }
  enough = true;
  one.join();
  other.join();
  const std::vector<Record> records = recorder.read();
  CHECK(records.size() == Recorder::kEntries && records.back().index == written - 1);
}

void a_peer_reads_what_a_killed_process_was_doing() {
  const Memory memory;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    Recorder recorder(memory.get());
    recorder.complete(recorder.begin(call_number(8)));
    recorder.begin(call_number(9));
    raise(SIGKILL);
  }
  CHECK(waitpid(child, nullptr, 0) == child);
  const std::vector<Record> records = Recorder::read(memory.get(), ClockPair::now());
  CHECK(records.size() == 2 && is_whole(records[1]));
  CHECK(records[1].call.sequence == 9 && records[1].state == CallState::kStarted);
}

void memory_that_makes_no_sense_gives_no_records() {
  const Memory memory;
  std::memset(memory.get(), 0xfe, Recorder::bytes());
  CHECK(Recorder::read(memory.get(), ClockPair::now()).empty());
}

void report_the_cost() {
  const Memory memory;
  Recorder recorder(memory.get());
  const Descriptor call = call_number(7);
  constexpr int kCalls = 200'000;
  const int64_t begin = now_ns();
  for (int i = 0; i < kCalls; ++i) recorder.complete(recorder.begin(call));
  std::fprintf(stderr, " %.1f ns per call,", static_cast<double>(now_ns() - begin) / kCalls);
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(60);
  RUN_TEST(a_call_is_read_as_it_was_written);
  RUN_TEST(times_agree_with_the_monotonic_clock);
  RUN_TEST(an_issued_call_starts_when_it_has_its_turn);
  RUN_TEST(an_issued_call_that_the_ring_has_lost_is_added_again);
  RUN_TEST(the_ring_keeps_the_last_calls);
  RUN_TEST(a_reader_never_sees_a_mixture);
  RUN_TEST(a_peer_reads_what_a_killed_process_was_doing);
  RUN_TEST(memory_that_makes_no_sense_gives_no_records);
  RUN_TEST(report_the_cost);
  return 0;
}
