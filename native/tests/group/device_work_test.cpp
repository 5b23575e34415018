// Calls on arrays on a device: a message has the same place on both sides, and the work that a call has started is
// followed to its end.
#include <atomic>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "group/group_operation.hpp"
#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

std::vector<Rank> world_of(int size, const std::vector<int>& hosts) {
  return make_world(size, ReadingRanges::for_this_processor(), kTiny, hosts);
}

Descriptor collective(uint64_t sequence) {
  Descriptor call;
  call.op = OpKind::kAllReduce;
  call.count = 3;
  call.sequence = sequence;
  call.external = call.on_device = true;
  return call;
}

void wait_for(const Operation& operation) {
  while (!operation.is_completed()) std::this_thread::yield();
}

// The queue of a device: a message moves when its place has come.
struct Queue {
  std::atomic<uint64_t> next{0};
  std::vector<uint64_t> tags;

  ExternalTransfer transfer(uint64_t tag) {
    return [this, tag](int, uint64_t number, std::vector<int>&) {
      if (next != number) return false;
      tags.push_back(tag);
      ++next;
      return true;
    };
  }
};

// Both the caller's thread and the progress thread advance them. Of one tag they keep their order.
void messages_have_the_same_places_on_both_sides(const std::vector<int>& hosts) {
  constexpr uint64_t kMessages = 8;
  constexpr int kRounds = 50;
  std::vector<Rank> world = world_of(2, hosts);
  std::vector<Queue> queues(2);
  in_all_ranks(world, [&](Group& group) {
    const bool sends = group.rank() == 0;
    Queue& queue = queues[static_cast<size_t>(group.rank())];
    int64_t data = 0;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::shared_ptr<GroupOperation>> operations;
      for (uint64_t index = 0; index < kMessages; ++index) {
        const uint64_t tag = (sends ? index : kMessages - 1 - index) / 2;  // two of each
        MessageRequest request{sends ? OpKind::kSend : OpKind::kRecv, &data, 1, Dtype::kInt64, sends ? 1 : 0, tag};
        request.transfer = queue.transfer(tag);
        request.on_device = true;
        operations.push_back(group.start_message(request, 60));
      }
      for (bool all = false; !all;) {
        all = true;
        for (const auto& operation : operations) all = operation->help() == Progress::kDone && all;
      }
      for (const auto& operation : operations)
        check(operation->failure() == nullptr, "expected to end well", group.rank());
    }
  });
  check(queues[0].tags == queues[1].tags, "expected one order", 0);
  check(queues[0].tags.size() == kMessages * kRounds, "expected all messages", 0);
}

void work_ends_when_the_device_has_finished_and_in_order() {
  std::vector<Rank> world = world_of(1, {});
  Group& group = *world[0].group;
  std::atomic<bool> first_ends{false};
  std::atomic<int> looked_at_second{0};
  const auto first = group.follow(collective(1), [&] { return first_ends.load(); }, 60);
  const auto second = group.follow(collective(2), [&] { return ++looked_at_second > 0; }, 60);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  check(!first->is_completed() && !second->is_completed() && !group.is_idle(), "expected them to run", 0);
  check(looked_at_second == 0, "expected to wait for the first", 0);
  first_ends = true;
  wait_for(*second);
  check(first->failure() == nullptr && second->failure() == nullptr, "expected to end well", 0);
}

// Nobody holds a Work of a blocking call: the next call reports what became of it, and later ones that the group ended.
void the_next_call_reports_the_failure_of_a_blocking_one() {
  std::vector<Rank> world = world_of(1, {});
  Group& group = *world[0].group;
  const auto work = group.follow(collective(1), [] { return false; }, 0.05, true);
  wait_for(*work);
  NoRuntime language;
  std::vector<Failure::Kind> kinds;
  for (int call = 0; call < 2; ++call) {
    Request barrier;
    try {
      group.run(barrier, 60, language);
    } catch (const OperationFailed& failed) {
      kinds.push_back(failed.failure.kind);
    }
  }
  check(kinds == std::vector{Failure::Kind::kTimeout, Failure::Kind::kBroken}, "expected one report", 0);
}

void a_barrier_waits_for_the_work_of_collectives() {
  std::vector<Rank> world = world_of(2, {0, 0});
  std::atomic<bool> ends{false};
  std::atomic<int> passed{0};
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    const auto work = group.follow(collective(1), [&] { return ends.load(); }, 60);
    std::thread later;
    if (group.rank() == 0)
      later = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        check(passed == 0, "expected the barrier to wait", 0);
        ends = true;
      });
    Request barrier;
    barrier.after_device_work = true;
    group.run(barrier, 60, language);
    ++passed;
    check(work->is_completed(), "expected the work to have ended", group.rank());
    if (later.joinable()) later.join();
  });
}

// What ends the work of rank 0 ends its group on both ranks, once.
void work_that_fails_ends_the_group(const char* how) {
  const std::string reason = how;
  std::vector<Rank> world = world_of(2, {0, 0});
  std::atomic<int> ended{0};
  in_all_ranks(world, [&](Group& group) {
    group.on_broken([&] { ++ended; });
    const bool is_first = group.rank() == 0;
    const auto work = group.follow(
        collective(1),
        [&, is_first] {
          if (is_first && reason == "throws") throw std::runtime_error("out of ink");
          return false;
        },
        is_first && reason == "deadline" ? 0.1 : 60);
    if (is_first && reason == "abort") group.abort();
    wait_for(*work);
    const std::string text = work->failure()->summary();
    if (is_first && reason == "throws") check(text.find("out of ink") != std::string::npos, text.c_str(), 0);
    if (is_first && reason == "deadline")
      check(work->failure()->kind == Failure::Kind::kTimeout && text.find("GPU") != std::string::npos, text.c_str(), 0);
    check(group.is_completed(), "expected the group to have ended", group.rank());
    const auto later = group.follow(collective(2), [] { return false; }, 60);
    check(later->is_completed() && later->failure() != nullptr, "expected later work to fail", group.rank());
  });
  check(ended == 2, "expected each rank to end its work once", 0);
}

// An abort ends what the device does, and so the device has finished: that is no success.
void work_that_an_abort_has_ended_fails() {
  std::vector<Rank> world = world_of(1, {});
  Group& group = *world[0].group;
  std::atomic<bool> has_finished{false};
  std::shared_ptr<GroupOperation> work;
  group.on_broken([&] {
    has_finished = true;
    work->help();
  });
  work = group.follow(collective(1), [&] { return has_finished.load(); }, 60);
  group.abort();
  wait_for(*work);
  check(work->failure() != nullptr, "expected a failure", 0);
}

}  // namespace

int main() {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}})
    messages_have_the_same_places_on_both_sides(hosts);
  work_ends_when_the_device_has_finished_and_in_order();
  the_next_call_reports_the_failure_of_a_blocking_one();
  a_barrier_waits_for_the_work_of_collectives();
  for (const char* how : {"throws", "deadline", "abort"}) work_that_fails_ends_the_group(how);
  work_that_an_abort_has_ended_fails();
  std::puts("device_work_test: passed");
}
