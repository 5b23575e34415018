// How calls that NCCL moves end when a group fails, or is left: the streams of all ranks run on, and each rank names
// the cause.
#include <sys/wait.h>

#include "tests/nccl/nccl_fixture.hpp"

using namespace procgroup;

#ifdef __SANITIZE_THREAD__
// A communicator whose other rank has aborted is never freed: its thread waits inside of NCCL's end.
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0"; }
#endif

namespace {

constexpr size_t kCount = 16;
constexpr int kBehind = 100;

// Calls on one stream and array, none of which is awaited.
struct Burst {
  Burst(NcclRank& rank, size_t count) : mine(rank), stream(rank.make_stream()), array(rank.gpu(), stream, count) {
    array.write(values(rank.rank(), count));
  }
  void add(int calls, double seconds = kLong) {
    for (int call = 0; call < calls; ++call) {
      try {
        issued.push_back(mine.issue(mine.all_reduce(array), {stream}, true, seconds));
      } catch (const OperationFailed&) {
        return;  // the group has ended
      }
    }
  }
  // The stream runs on, whatever became of the calls; they have ended, too.
  void drain() {
    mine.synchronize(stream);
    for (const IssuedCall& call : issued) call.wait();
  }

  NcclRank& mine;
  CudaStream stream;
  DeviceArray array;
  std::vector<IssuedCall> issued;
};

// Rank 0 reduces more elements than the others do, with calls queued behind that: all ranks say so, no array is
// touched, and the streams run on.
void a_mismatch_ends_all_calls_and_leaves_the_arrays_alone(int size, bool may_gate) {
  NcclWorld world(size, may_gate);
  world.in_all_ranks([&](NcclRank& mine) {
    Burst burst(mine, kCount);
    connect(mine, burst.stream);
    DeviceArray larger(mine.gpu(), burst.stream, kCount + 1);
    burst.issued.push_back(mine.issue(mine.all_reduce(mine.rank() == 0 ? larger : burst.array), {burst.stream}));
    burst.add(kBehind);
    burst.drain();
    const Failure* failure = burst.issued[0].wait();
    check(failure != nullptr && failure->is<Mismatch>(), "expected a mismatch", mine.rank());
    for (const IssuedCall& call : burst.issued) check(call.wait() != nullptr, "expected a failure", mine.rank());
    CHECK_EQUAL(burst.array.read(), values(mine.rank(), kCount));
  });
}

void an_abort_during_a_burst_ends_it(int size, int after) {
  NcclWorld world(size);
  std::atomic<int> connected{0}, begun{0};
  std::thread aborting([&] {
    while (connected < size || begun < after) std::this_thread::yield();
    world.group(0).abort();
  });
  world.in_all_ranks([&](NcclRank& mine) {
    Burst burst(mine, kCount);
    connect(mine, burst.stream);
    ++connected;
    for (int call = 0; call < 300; ++call) {
      burst.add(1);
      ++begun;
    }
    burst.drain();
  });
  aborting.join();
}

// Aborts that come at any point of the calls, from two threads.
void aborts_at_any_time_end_everything() {
  for (int round = 0; round < 40; ++round) {
    CASE("round %d", round);
    NcclWorld world(2);
    std::atomic<int> connected{0};
    std::vector<std::thread> aborting;
    for (const int rank : {0, 1})
      aborting.emplace_back([&, rank] {
        while (connected < 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(round * 37 + rank * 11));
        world.group(rank).abort();
      });
    world.in_all_ranks([&](NcclRank& mine) {
      Burst burst(mine, kCount);
      if (round % 4 != 0) connect(mine, burst.stream);
      ++connected;
      burst.add(50);
      burst.drain();
    });
    for (std::thread& one : aborting) one.join();
  }
}

void a_rank_that_never_comes_ends_calls_at_their_deadline() {
  NcclWorld world(2);
  world.in_all_ranks([&](NcclRank& mine) {
    Burst burst(mine, kCount);
    connect(mine, burst.stream);
    if (mine.rank() == 1) return;
    burst.add(kBehind, 0.3);
    burst.drain();
    const Failure* failure = burst.issued[0].wait();
    check(failure != nullptr && failure->is<Timeout>(), "expected a timeout", 0);
    CHECK_EQUAL(failure->as<Timeout>()->missing, std::vector<int>{1});
    CHECK_EQUAL(burst.array.read(), values(0, kCount));
  });
}

void a_communicator_that_never_connects_ends_calls_at_their_deadline() {
  NcclWorld world(2);
  world.meeting.absent = {1};
  world.in_all_ranks([&](NcclRank& mine) {
    Burst burst(mine, kCount);
    burst.add(10, 0.3);
    burst.drain();
    for (const IssuedCall& call : burst.issued) check(call.wait() != nullptr, "expected a failure", mine.rank());
    CHECK_EQUAL(burst.array.read(), values(mine.rank(), kCount));
  });
}

// A communicator that is connected only when the group has failed is aborted: its thread ends, and lets go of it.
void a_communicator_that_connects_after_a_failure_is_ended() {
  std::weak_ptr<const NcclLibrary> library;
  {
    NcclWorld world(2);
    world.meeting.absent = {1};
    world.in_all_ranks([&](NcclRank& mine) {
      Burst burst(mine, kCount);
      burst.add(1, 0.3);
      burst.drain();
    });
    library = world.library();
    // Rank 1 comes now.
    const NcclId id = world.meeting.ids.at(NcclBackend::kAll);
    const auto late = NcclCommunicator::connect(library.lock(), Gpu::get(1), 2, 1, id, ConnectTask::config());
    while (!late->is_connected()) std::this_thread::yield();
    NcclCommunicator::abort({late}, [] {});
  }
  while (!library.expired()) std::this_thread::yield();
}

// The calls of a group that is left before they have begun end, and so does the wait of the streams for them.
void leaving_lets_the_streams_run_on(int calls_of_second) {
  NcclWorld world(2);
  std::vector<std::unique_ptr<Burst>> bursts(2);
  std::vector<std::unique_ptr<NcclRank>> ranks(2);
  world.in_all_ranks([&](NcclRank& mine) {
    const auto at = static_cast<size_t>(mine.rank());
    ranks[at] = std::make_unique<NcclRank>(mine);
    bursts[at] = std::make_unique<Burst>(*ranks[at], kCount);
    connect(mine, bursts[at]->stream);
    bursts[at]->add(mine.rank() == 0 ? kBehind : calls_of_second);
  });
  world.leave();
  for (const auto& burst : bursts) burst->drain();
}

void leaving_ends_calls_that_await_the_other_rank() { leaving_lets_the_streams_run_on(0); }
void leaving_ends_calls_that_one_rank_makes_more_of() { leaving_lets_the_streams_run_on(kBehind / 2); }
void leaving_ends_calls_of_all_ranks() { leaving_lets_the_streams_run_on(kBehind); }

// What a call refers to is let go of, however it ends.
void every_owner_is_let_go_of(bool may_gate, int delay_us) {
  std::weak_ptr<int> owned;
  {
    NcclWorld world(2, may_gate);
    const auto owner = std::make_shared<int>(1);
    owned = owner;
    std::atomic<int> connected{0};
    world.in_all_ranks([&](NcclRank& mine) {
      Burst burst(mine, kCount);
      connect(mine, burst.stream);
      for (++connected; connected < 2;) std::this_thread::yield();
      try {
        for (int call = 0; call < 50; ++call)
          burst.issued.push_back(mine.issue(mine.all_reduce(burst.array), {burst.stream}, true, kLong, owner));
      } catch (const OperationFailed&) {
      }
      if (mine.rank() == 1) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      if (mine.rank() == 1) mine.group.abort();
      burst.drain();
      mine.group.abort();  // also where rank 0 has ended all calls before: else it would wait for the other to leave
    });
  }
  while (!owned.expired()) std::this_thread::yield();
}

void owners_are_let_go_of_wherever_an_abort_comes() {
  for (const bool may_gate : {true, false})
    for (int round = 0; round < 20; ++round) {
      CASE("round %d, %s gates", round, may_gate ? "with" : "without");
      every_owner_is_let_go_of(may_gate, round * 53);
    }
}

#ifndef __SANITIZE_THREAD__  // it ends a forked child that starts a thread

// What a forked child lets go of is still in use here.
void a_forked_child_ends_nothing() {
  auto world = std::make_unique<NcclWorld>(2);
  std::vector<CudaStream> streams(2);
  world->in_all_ranks(
      [&](NcclRank& mine) { connect(mine, streams[static_cast<size_t>(mine.rank())] = mine.make_stream()); });
  const pid_t child = fork();
  if (child == 0) {
    world->let_go();
    usleep(200'000);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  world->in_all_ranks([&](NcclRank& mine) { connect(mine, streams[static_cast<size_t>(mine.rank())]); });
}

#endif

}  // namespace

int main() {
  use_stand_ins();
  for (const bool may_gate : {true, false}) {
    CASE("%s gates", may_gate ? "with" : "without");
    RUN_TEST(a_mismatch_ends_all_calls_and_leaves_the_arrays_alone, 2, may_gate);
    RUN_TEST(a_mismatch_ends_all_calls_and_leaves_the_arrays_alone, 4, may_gate);
  }
  RUN_TEST(an_abort_during_a_burst_ends_it, 2, 100);
  RUN_TEST(an_abort_during_a_burst_ends_it, 4, 250);
  RUN_TEST(aborts_at_any_time_end_everything);
  RUN_TEST(a_rank_that_never_comes_ends_calls_at_their_deadline);
  RUN_TEST(a_communicator_that_never_connects_ends_calls_at_their_deadline);
  RUN_TEST(owners_are_let_go_of_wherever_an_abort_comes);
  RUN_TEST(leaving_ends_calls_of_all_ranks);
  RUN_TEST(leaving_ends_calls_that_one_rank_makes_more_of);
  RUN_TEST(leaving_ends_calls_that_await_the_other_rank);
  RUN_TEST(a_communicator_that_connects_after_a_failure_is_ended);
#ifndef __SANITIZE_THREAD__
  RUN_TEST(a_forked_child_ends_nothing);
#endif
}
