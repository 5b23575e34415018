// A store that the threads of one process share without a server.
#include "store/in_process_store.hpp"

#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/store/store_fixture.hpp"

namespace {

using namespace procgroup;           // NOLINT
using namespace procgroup::store;    // NOLINT
using namespace procgroup::testing;  // NOLINT

constexpr int kThreads = 8;
constexpr int kTurns = 200;

Reply get(InProcessStore& store, std::string_view key, Deadline deadline, const Check& check = kNothing) {
  return store.request(Op::kGet, key_only(key), {}, deadline, check);
}

Reply pop(InProcessStore& store, std::string_view key, Deadline deadline) {
  return store.request(Op::kQueuePop, key_only(key) + '\1', {}, deadline, kNothing);
}

void push(InProcessStore& store, std::string_view key, std::string_view value) {
  std::string head = key_only(key);
  put_length(head, value.size());
  CHECK(store.request(Op::kQueuePush, head, value, soon(), kNothing).status == Status::kOk);
}

void start_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

void threads_wait_for_each_other() {
  InProcessStore store;
  start_threads([&](int number) {
    const std::unique_ptr<InProcessStore> mine = store.clone();
    for (int turn = 0; turn < kTurns; ++turn) {
      CASE("thread %d, turn %d", number, turn);
      add(*mine, "total", 1);
      const std::string prefix = "turn " + std::to_string(turn) + " of ";
      set(*mine, prefix + std::to_string(number), std::to_string(number));
      const int next = (number + 1) % kThreads;
      CHECK(get(*mine, prefix + std::to_string(next), soon()).body == std::to_string(next));
      barrier(*mine, "turns", kThreads);
    }
  });
  CHECK(add(store, "total", 0) == kThreads * kTurns);
}

// Pops of some threads time out while others push: no value is lost, and none is taken twice.
void each_value_of_a_queue_reaches_one_thread() {
  InProcessStore store;
  std::atomic<uint64_t> sum{0};
  std::atomic<int> taken{0};
  start_threads([&](int number) {
    if (number % 2 == 0) {
      for (int turn = 1; turn <= kTurns; ++turn) push(store, "queue", std::to_string(turn));
      return;
    }
    while (taken < kTurns * kThreads / 2) {
      const Reply reply = pop(store, "queue", Deadline::after(0.0001));
      if (reply.status == Status::kCancelled) continue;
      sum += std::stoul(reply.body);
      ++taken;
    }
  });
  CHECK(sum == uint64_t{kThreads} / 2 * kTurns * (kTurns + 1) / 2);
}

// Where a wait is interrupted now and then, to call `check`, nothing shows that nobody has woken its thread.
void an_answer_wakes_the_thread_that_waits_for_it() {
  constexpr int64_t kHourNs = int64_t{3600} * 1'000'000'000;
  CASE("two threads meet at a barrier");
  InProcessStore store(kHourNs);
  std::string gate = key_only("gate");
  put(gate, uint64_t{2});
  std::atomic<int> went_through{0};
  const auto go_through = [&] {
    CHECK(store.request(Op::kBarrier, gate, {}, Deadline::never(), kNothing).status == Status::kOk);
    ++went_through;
  };
  std::thread first(go_through);
  std::thread second(go_through);
  const Deadline guard = soon();
  while (went_through < 2 && !guard.passed()) std::this_thread::yield();
  CHECK_EQUAL(went_through.load(), 2);
  first.join();
  second.join();
}

void a_deadline_cancels_the_request() {
  InProcessStore store;
  for (int i = 0; i < 3; ++i) {
    const int64_t begin = now_ns();
    CHECK(get(store, "missing", Deadline::after(0.02)).status == Status::kCancelled);
    CHECK(now_ns() - begin >= 20'000'000);
    CHECK(get(store, "missing", Deadline::after(0)).status == Status::kCancelled);
  }
  CHECK(pop(store, "queue", Deadline::after(0.01)).status == Status::kCancelled);
  push(store, "queue", "kept");
  CHECK(pop(store, "queue", soon()).body == "kept");
}

// As a signal's handler does: it may use the store itself, and then ends the wait with an exception.
void a_check_may_use_the_store_and_ends_the_wait() {
  struct Interrupted {};
  InProcessStore store;
  CHECK(throws<Interrupted>([&] {
    get(store, "missing", soon(), [&] {
      add(store, "n", 1);
      throw Interrupted{};
    });
  }));
  CHECK(add(store, "n", 0) == 1);
  const Reply reply = get(store, "late", soon(), [&] { set(store, "late", "value"); });
  CHECK(reply.body == "value");
}

void a_closed_store_leaves_its_clones_open() {
  InProcessStore store;
  const std::unique_ptr<InProcessStore> clone = store.clone();
  set(store, "key", "value");
  store.close();
  CHECK(throws<ClosedStore>([&] { get(store, "key", soon()); }));
  CHECK(throws<ClosedStore>([&] { store.clone(); }));
  CHECK(get(*clone, "key", soon()).body == "value");
}

int exit_status_of_child(const std::function<bool()>& succeeds) {
  const pid_t child = fork();
  if (child == 0) _exit(succeeds() ? 0 : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

// The process forks while other threads wait and change the table. The child neither waits for a lock nor ends badly.
void a_forked_child_is_refused_at_once() {
  auto store = std::make_unique<InProcessStore>();
  std::atomic<bool> ends{false};
  std::thread waiter([&] { CHECK(get(*store, "end", soon()).body == "x"); });
  std::thread writer([&] {
    while (!ends) set(*store, "key", "value");
  });
  for (int i = 0; i < 20; ++i) {
    CHECK(exit_status_of_child([&] {
            const bool refused = throws<ForkedStore>([&] { get(*store, "key", Deadline::never()); });
            store.reset();
            return refused;
          }) == 0);
  }
  ends = true;
  set(*store, "end", "x");
  waiter.join();
  writer.join();
}

// A signal's handler may fork, too, while the thread that it interrupts waits.
void a_fork_inside_a_wait_ends_the_childs_wait() {
  InProcessStore store;
  bool forked = false;
  int status = -1;
  const auto fork_once = [&] {
    if (forked) return;
    forked = true;
    const pid_t child = fork();
    if (child == 0) return;  // goes on inside the parent's wait
    CHECK(waitpid(child, &status, 0) == child);
  };
  const pid_t parent = getpid();
  try {
    CHECK(get(store, "missing", Deadline::after(0.3), fork_once).status == Status::kCancelled);
  } catch (const ForkedStore&) {
    _exit(getpid() == parent ? 2 : 0);
  }
  CHECK(getpid() == parent);
  CHECK(status == 0);
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(threads_wait_for_each_other);
  RUN_TEST(each_value_of_a_queue_reaches_one_thread);
  RUN_TEST(an_answer_wakes_the_thread_that_waits_for_it);
  RUN_TEST(a_deadline_cancels_the_request);
  RUN_TEST(a_check_may_use_the_store_and_ends_the_wait);
  RUN_TEST(a_closed_store_leaves_its_clones_open);
  RUN_TEST(a_forked_child_is_refused_at_once);
  RUN_TEST(a_fork_inside_a_wait_ends_the_childs_wait);
  return 0;
}
