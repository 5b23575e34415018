// A sleeping thread is woken by the event that it waits for. Results do not show a lost wake-up, because each sleep
// ends by itself some milliseconds later.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "group/group_operation.hpp"
#include "tests/engine_fixture.hpp"
#include "tests/sleepers.hpp"

using namespace procgroup;
using namespace procgroup::testing;

namespace {

constexpr int64_t kHourNs = int64_t{3600} * 1'000'000'000;

std::atomic<uint32_t>& doorbell_of(const Rank& rank) { return rank.engine->arena().header().doorbell; }

void ringing_a_doorbell_wakes_all_threads_that_sleep_on_it() {
  constexpr int kSleepers = 3;
  std::vector<Rank> world = make_world(2);
  std::atomic<uint32_t>& doorbell = doorbell_of(world[0]);
  std::atomic<bool> rung{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kSleepers; ++thread)
    threads.emplace_back([&] {
      while (!rung) world[0].engine->sleep(kHourNs, [&] { return rung.load(); });
    });
  await_sleepers(doorbell, kSleepers);
  rung = true;
  world[1].engine->peer_arena(0)->wake();
  CHECK_EQUAL(sleepers_on(doorbell), 0);
  for (std::thread& thread : threads) thread.join();
}

// The progress thread has found that it cannot begin the call that queues, and may sleep.
void the_end_of_a_call_rings_for_those_that_queue_behind_it() {
  std::vector<Rank> world = make_world(1);
  Group& group = *world[0].group;
  const std::atomic<uint32_t>& doorbell = doorbell_of(world[0]);
  std::vector<int64_t> data[2] = {values(0, 4), values(0, 4)};
  Request queueing = request_for(OpKind::kAllReduce, data[0]);
  std::atomic<bool> may_begin{false};
  queueing.before = [&] { may_begin.wait(false); };  // its own end rings, too
  std::shared_ptr<GroupOperation> queued;
  uint32_t rung = 0;
  Request running = request_for(OpKind::kAllReduce, data[1]);
  running.before = [&] {
    queued = group.calls().start(queueing, 60);
    rung = doorbell.load();
  };
  NoRuntime language;
  group.calls().run(running, 60, language);
  CHECK_EQUAL(doorbell.load() - rung, 1U);
  may_begin = true;
  may_begin.notify_one();
  while (!queued->is_completed()) std::this_thread::yield();
  CHECK(queued->failure() == nullptr);
}

}  // namespace

int main() {
  RUN_TEST(ringing_a_doorbell_wakes_all_threads_that_sleep_on_it);
  RUN_TEST(the_end_of_a_call_rings_for_those_that_queue_behind_it);
}
