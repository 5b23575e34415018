// Life locks and watchers between real processes that are killed, stopped, replaced and leave.
#include "liveness/life.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <functional>
#include <memory>
#include <new>

#include "base/clock.hpp"
#include "base/file_descriptor.hpp"
#include "tests/check.hpp"
#include "tests/sleepers.hpp"

namespace procgroup {
namespace {

constexpr int kVictim = 7;

// What the processes of one test share.
struct Stage {
  LifeWord words[4];
  std::atomic<int> ready{0};
  std::atomic<int64_t> lost_at_ns[4]{};
};

struct Unmap {
  void operator()(Stage* stage) const { munmap(stage, sizeof(Stage)); }
};
using SharedStage = std::unique_ptr<Stage, Unmap>;

SharedStage make_stage() {
  void* memory = mmap(nullptr, sizeof(Stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return SharedStage(new (memory) Stage);
}

void pause_ms(int milliseconds) {
  timespec time{0, milliseconds * 1'000'000L};
  nanosleep(&time, nullptr);
}

void await(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(10);
  while (!condition()) {
    CHECK(!deadline.passed());
    pause_ms(1);
  }
}

// A forked process; killed and reaped when it goes out of scope.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(fork()) {
    CHECK(pid_ >= 0);
    if (pid_ > 0) return;
    alarm(30);
    body();
    _exit(0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { end(); }

  void send(int signal) const { CHECK(kill(pid_, signal) == 0); }
  void end() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

[[noreturn]] void live_forever() {
  for (;;) pause();
}

// Holds its word until it is killed.
std::function<void()> holder(Stage& stage, int index) {
  return [&stage, index] {
    const LifeLock lock(stage.words[index]);
    stage.ready.fetch_add(1);
    live_forever();
  };
}

// What a watcher reported.
struct Reports {
  std::atomic<int> lost{0};
  std::atomic<int> left{0};
  std::atomic<int> last_peer{-1};
  std::atomic<bool> by_connection{false};

  LifeWatcher::OnLost on_lost() {
    return [this](int peer, const std::string& how) {
      last_peer = peer;
      by_connection = how.find("connection") != std::string::npos;
      ++lost;
    };
  }
  LifeWatcher::OnLeft on_left() {
    return [this](int peer) {
      last_peer = peer;
      ++left;
    };
  }
  bool none() const { return lost == 0 && left == 0; }
};

std::function<void()> watching_child(Stage& stage, int own, int victim) {
  return [&stage, own, victim] {
    const LifeLock lock(stage.words[own]);
    LifeWatcher watcher([&](int, const std::string&) { stage.lost_at_ns[own] = now_ns(); }, [](int) {});
    watcher.watch(victim, stage.words[victim]);
    stage.ready.fetch_add(1);
    live_forever();
  };
}

void a_killed_process_is_lost_for_every_watcher() {
  const SharedStage stage = make_stage();
  Child victim(holder(*stage, 0));
  await([&] { return stage->ready == 1; });
  Child first(watching_child(*stage, 1, 0));
  Child second(watching_child(*stage, 2, 0));
  await([&] { return stage->ready == 3; });
  Reports reports;
  LifeWatcher watcher(
      [&](int peer, const std::string& how) {
        stage->lost_at_ns[3] = now_ns();
        reports.on_lost()(peer, how);
      },
      reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  pause_ms(50);  // all asleep: the interesting case, not a condition of success
  const int64_t killed_at = now_ns();
  victim.send(SIGKILL);
  await([&] { return stage->lost_at_ns[1] != 0 && stage->lost_at_ns[2] != 0 && reports.lost == 1; });
  for (int index = 1; index < 4; ++index)
    std::fprintf(stderr, " %.2f ms,", static_cast<double>(stage->lost_at_ns[index] - killed_at) / 1e6);
  victim.end();
  pause_ms(150);
  CHECK(reports.lost == 1 && reports.left == 0 && reports.last_peer == kVictim && !reports.by_connection);
}

// The kernel wakes one watcher. The others are awake when that one reports the death: they do not sleep until their
// next look.
void the_first_woken_watcher_wakes_the_others() {
  constexpr long kFutexWaitv = 449;
  if (syscall(kFutexWaitv, nullptr, 0, 0, nullptr, 0) != -1 || errno != EINVAL) {
    std::puts("life_test: the kernel cannot wait for several futexes");
    return;
  }
  constexpr int kWatchers = 6;
  const SharedStage stage = make_stage();
  Child victim(holder(*stage, 0));
  await([&] { return stage->ready == 1; });
  std::atomic<int> reports{0};
  std::atomic<long> most_asleep{0};
  std::vector<std::unique_ptr<LifeWatcher>> watchers;
  for (int index = 0; index < kWatchers; ++index) {
    watchers.push_back(std::make_unique<LifeWatcher>(
        [&](int, const std::string&) {
          const long asleep = testing::sleepers_on(stage->words[0].word);
          for (long most = most_asleep; asleep > most && !most_asleep.compare_exchange_weak(most, asleep);) {
          }
          ++reports;
        },
        [](int) {}));
    watchers.back()->watch(kVictim, stage->words[0]);
  }
  testing::await_sleepers(stage->words[0].word, kWatchers);
  victim.send(SIGKILL);
  await([&] { return reports == kWatchers; });
  CHECK_EQUAL(most_asleep.load(), 0);
}

void an_orderly_leave_is_no_loss() {
  const SharedStage stage = make_stage();
  Child victim([&] {
    LifeLock lock(stage->words[0]);
    stage->ready = 1;
    await([&] { return stage->ready == 2; });
    lock.release();
    lock.release();
  });
  await([&] { return stage->ready == 1; });
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  pause_ms(20);
  CHECK(reports.none());
  stage->ready = 2;
  await([&] { return reports.left == 1; });
  pause_ms(150);
  CHECK(reports.left == 1 && reports.lost == 0);
}

void a_stopped_process_lives() {
  const SharedStage stage = make_stage();
  Child victim(holder(*stage, 0));
  await([&] { return stage->ready == 1; });
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  victim.send(SIGSTOP);
  pause_ms(350);
  CHECK(reports.none());
  victim.send(SIGCONT);
  pause_ms(50);
  CHECK(reports.none());
  victim.send(SIGKILL);
  await([&] { return reports.lost == 1; });
}

void a_process_that_becomes_another_program_is_lost() {
  const SharedStage stage = make_stage();
  Child victim([&] {
    const LifeLock lock(stage->words[0]);
    stage->ready = 1;
    await([&] { return stage->ready == 2; });
    execl("/bin/sleep", "sleep", "30", nullptr);
  });
  await([&] { return stage->ready == 1; });
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  stage->ready = 2;
  await([&] { return reports.lost == 1; });
}

void threads_that_end_are_no_death() {
  const SharedStage stage = make_stage();
  Child victim([&] {
    new LifeLock(stage->words[0]);  // stays when the first thread has ended
    std::thread([&] { stage->ready = 1; }).join();
    syscall(SYS_exit, 0);
  });
  await([&] { return stage->ready == 1; });
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  pause_ms(250);
  CHECK(reports.none());
  victim.send(SIGKILL);
  await([&] { return reports.lost == 1; });
}

// The first watcher is the one that the kernel wakes; stopped, it passes nothing on.
void the_death_of_the_first_woken_watcher_hides_nothing() {
  for (const bool killed : {true, false}) {
    CASE("killed %d", killed);
    const SharedStage stage = make_stage();
    Child victim(holder(*stage, 0));
    await([&] { return stage->ready == 1; });
    Child first(watching_child(*stage, 1, 0));
    await([&] { return stage->ready == 2; });
    pause_ms(20);
    first.send(SIGSTOP);
    Reports reports;
    LifeWatcher watcher(reports.on_lost(), reports.on_left());
    watcher.watch(kVictim, stage->words[0]);
    watcher.watch(1, stage->words[1]);
    pause_ms(20);
    const int64_t killed_at = now_ns();
    victim.send(SIGKILL);
    if (killed) first.send(SIGKILL);
    await([&] { return reports.lost == (killed ? 2 : 1); });
    std::fprintf(stderr, " %.2f ms%s", static_cast<double>(now_ns() - killed_at) / 1e6, killed ? "," : " when stopped");
  }
}

void any_number_of_words_is_watched_however_it_waits() {
  for (const auto waiting : {LifeWatcher::Waiting::kFutexes, LifeWatcher::Waiting::kPolling}) {
    CASE("by %s", waiting == LifeWatcher::Waiting::kFutexes ? "futexes" : "polling");
    const SharedStage stage = make_stage();
    Child victim(holder(*stage, 0));
    await([&] { return stage->ready == 1; });
    std::vector<LifeWord> others(200);
    Reports reports;
    LifeWatcher watcher(reports.on_lost(), reports.on_left(), waiting);
    for (LifeWord& other : others) {
      other.word = 1;
      watcher.watch(1, other);
    }
    watcher.watch(kVictim, stage->words[0]);
    pause_ms(30);
    victim.send(SIGKILL);
    await([&] { return reports.lost == 1; });
    CHECK(reports.last_peer == kVictim && reports.left == 0);
    watcher.forget(1);
  }
}

void a_closed_connection_counts_when_the_word_says_nothing() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const FileDescriptor ours(ends[0]);
  FileDescriptor theirs(ends[1]);
  LifeWord held_without_robust_list;
  held_without_robust_list.word = 1234;
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, held_without_robust_list, ours.get());
  pause_ms(250);
  CHECK(reports.none());
  theirs.reset();
  await([&] { return reports.lost == 1; });
  CHECK(reports.by_connection && reports.left == 0);
}

// Where the word is still held 80 ms after the connection was closed, a watcher is right to report a loss.
void a_connection_closed_on_the_way_out_is_no_loss() {
  constexpr int64_t kQuickNs = 50'000'000;
  for (int attempt = 0; attempt < 5; ++attempt) {
    CASE("attempt %d", attempt);
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    const FileDescriptor ours(ends[0]);
    FileDescriptor theirs(ends[1]);
    LifeWord word;
    LifeLock lock(word);
    CHECK(lock.is_robust());
    Reports reports;
    LifeWatcher watcher(reports.on_lost(), reports.on_left());
    watcher.watch(kVictim, word, ours.get());
    const int64_t closed_at = now_ns();
    theirs.reset();
    lock.release();
    if (now_ns() - closed_at >= kQuickNs) continue;
    await([&] { return reports.left == 1; });
    CHECK(reports.lost == 0);
    return;
  }
  CHECK(false);  // no attempt was quick
}

void a_word_that_is_free_from_the_start_has_left() {
  LifeWord word;
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, word);
  await([&] { return reports.left == 1; });
  CHECK(reports.lost == 0);
}

void a_forgotten_peer_is_not_reported() {
  const SharedStage stage = make_stage();
  Child victim(holder(*stage, 0));
  await([&] { return stage->ready == 1; });
  Reports reports;
  LifeWatcher watcher(reports.on_lost(), reports.on_left());
  watcher.watch(kVictim, stage->words[0]);
  pause_ms(10);
  watcher.forget(kVictim);
  watcher.forget(kVictim);
  victim.end();
  pause_ms(150);
  CHECK(reports.none());
}

void callbacks_may_watch_and_forget() {
  LifeWord first;
  LifeWord second;
  second.word = 1;
  std::atomic<bool> done{false};
  LifeWatcher* self = nullptr;
  LifeWatcher watcher([](int, const std::string&) {},
                      [&](int) {
                        self->watch(2, second);
                        self->forget(2);
                        done = true;
                      });
  self = &watcher;
  watcher.watch(1, first);
  await([&] { return done.load(); });
}

void ranks_as_threads_leave_one_by_one() {
  LifeWord words[8];
  Reports reports;
  {
    LifeWatcher watcher(reports.on_lost(), reports.on_left());
    std::vector<std::unique_ptr<LifeLock>> locks;
    for (LifeWord& word : words) locks.push_back(std::make_unique<LifeLock>(word));
    for (int rank = 0; rank < 8; ++rank) watcher.watch(rank, words[rank]);
    for (int rank = 0; rank < 8; ++rank) {
      locks[static_cast<size_t>(rank)].reset();
      await([&] { return reports.left == rank + 1; });
      CHECK(reports.last_peer == rank);
    }
  }
  CHECK(reports.lost == 0);
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  testing::limit_seconds(100);
  RUN_TEST(a_killed_process_is_lost_for_every_watcher);
  RUN_TEST(the_first_woken_watcher_wakes_the_others);
  RUN_TEST(an_orderly_leave_is_no_loss);
  RUN_TEST(a_stopped_process_lives);
  RUN_TEST(a_process_that_becomes_another_program_is_lost);
  RUN_TEST(threads_that_end_are_no_death);
  RUN_TEST(the_death_of_the_first_woken_watcher_hides_nothing);
  RUN_TEST(any_number_of_words_is_watched_however_it_waits);
  RUN_TEST(a_closed_connection_counts_when_the_word_says_nothing);
  RUN_TEST(a_connection_closed_on_the_way_out_is_no_loss);
  RUN_TEST(a_word_that_is_free_from_the_start_has_left);
  RUN_TEST(a_forgotten_peer_is_not_reported);
  RUN_TEST(callbacks_may_watch_and_forget);
  RUN_TEST(ranks_as_threads_leave_one_by_one);
  return 0;
}
