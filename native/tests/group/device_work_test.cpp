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
#include "tests/function_task.hpp"

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

// An all_reduce of the array.
Request sum_of(std::vector<int64_t>& data) {
  Request request;
  request.descriptor.op = OpKind::kAllReduce;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = data.size();
  request.input = request.output = data.data();
  return request;
}

void wait_for(const Operation& operation) {
  while (!operation.is_completed()) std::this_thread::yield();
}

// The queue of a device: a message moves when its place has come.
struct Queue {
  std::atomic<uint64_t> next{0};
  std::vector<uint64_t> tags;

  std::shared_ptr<Task> task(uint64_t tag) {
    return moved_by([this, tag](int, uint64_t number, std::vector<int>&) {
      if (next != number) return false;
      tags.push_back(tag);
      ++next;
      return true;
    });
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
      CASE("round %d", round);
      std::vector<std::shared_ptr<GroupOperation>> operations;
      for (uint64_t index = 0; index < kMessages; ++index) {
        const uint64_t tag = (sends ? index : kMessages - 1 - index) / 2;  // two of each
        MessageRequest request{sends ? OpKind::kSend : OpKind::kRecv, &data, 1, Dtype::kInt64, sends ? 1 : 0, tag};
        request.task = queue.task(tag);
        request.external = request.on_device = true;
        operations.push_back(group.messages().start(request, 60));
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
  const auto first = group.devices().follow(collective(1), queued_until([&] { return first_ends.load(); }), 60);
  const auto second = group.devices().follow(collective(2), queued_until([&] { return ++looked_at_second > 0; }), 60);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  check(!first->is_completed() && !second->is_completed() && !group.is_idle(), "expected them to run", 0);
  check(looked_at_second == 0, "expected to wait for the first", 0);
  first_ends = true;
  wait_for(*second);
  check(first->failure() == nullptr && second->failure() == nullptr, "expected to end well", 0);
}

// The look that another thread has begun may be older than the end of the work.
void a_look_beside_another_one_is_no_answer() {
  std::vector<Rank> world = world_of(1, {});
  std::atomic<bool> has_ended{false}, is_looking{false}, goes_on{false};
  const auto work = world[0].group->devices().follow(collective(1), queued_until([&] {
                                                       const bool ended = has_ended;
                                                       is_looking = true;
                                                       while (!goes_on) std::this_thread::yield();
                                                       return ended;
                                                     }),
                                                     60);
  while (!is_looking) std::this_thread::yield();
  has_ended = true;
  check(work->help() == Progress::kMoved, "expected to be told to ask again", 0);
  goes_on = true;
  Progress progress = Progress::kMoved;
  while (progress == Progress::kMoved) progress = work->help();
  check(progress == Progress::kDone, "expected the end of the work to be seen", 0);
}

// Nobody holds a Work of a blocking call: the next call reports what became of it, and later ones that the group ended.
void the_next_call_reports_the_failure_of_a_blocking_one() {
  std::vector<Rank> world = world_of(1, {});
  Group& group = *world[0].group;
  const auto work = group.devices().follow(collective(1), queued_until([] { return false; }), 0.05, true);
  wait_for(*work);
  NoRuntime language;
  std::vector<FailureKind> kinds;
  for (int call = 0; call < 2; ++call) {
    Request barrier;
    try {
      group.calls().run(barrier, 60, language);
    } catch (const OperationFailed& failed) {
      kinds.push_back(failed.failure.kind());
    }
  }
  check(kinds == std::vector{FailureKind::kTimeout, FailureKind::kBroken}, "expected one report", 0);
}

// Also where the next call was waiting for another rank when the work failed.
void a_call_that_waits_reports_the_failure_of_a_blocking_one() {
  std::vector<Rank> world = world_of(2, {0, 0});
  Group& group = *world[0].group;
  const auto work = group.devices().follow(collective(1), queued_until([] { return false; }), 0.2, true);
  NoRuntime language;
  std::vector<FailureKind> kinds;
  for (int call = 0; call < 2; ++call) {
    Request barrier;
    try {
      group.calls().run(barrier, 60, language);
    } catch (const OperationFailed& failed) {
      kinds.push_back(failed.failure.kind());
    }
  }
  check(kinds == std::vector{FailureKind::kTimeout, FailureKind::kBroken}, "expected one report", 0);
}

void a_barrier_waits_for_the_work_of_collectives() {
  std::vector<Rank> world = world_of(2, {0, 0});
  std::atomic<bool> ends{false};
  std::atomic<int> passed{0};
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    const auto work = group.devices().follow(collective(1), queued_until([&] { return ends.load(); }), 60);
    std::thread later;
    if (group.rank() == 0)
      later = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        check(passed == 0, "expected the barrier to wait", 0);
        ends = true;
      });
    Request barrier;
    barrier.after_device_work = true;
    group.calls().run(barrier, 60, language);
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
    group.end().on_broken([&] { ++ended; });
    const bool is_first = group.rank() == 0;
    const auto work = group.devices().follow(collective(1), queued_until([&, is_first] {
                                               if (is_first && reason == "throws")
                                                 throw std::runtime_error("out of ink");
                                               return false;
                                             }),
                                             is_first && reason == "deadline" ? 0.1 : 60);
    if (is_first && reason == "abort") group.abort();
    wait_for(*work);
    const std::string text = work->failure()->summary();
    if (is_first && reason == "throws") check(text.find("out of ink") != std::string::npos, text.c_str(), 0);
    if (is_first && reason == "deadline")
      check(work->failure()->is<Timeout>() && text.find("GPU") != std::string::npos, text.c_str(), 0);
    check(group.end().is_completed(), "expected the group to have ended", group.rank());
    const auto later = group.devices().follow(collective(2), queued_until([] { return false; }), 60);
    check(later->is_completed() && later->failure() != nullptr, "expected later work to fail", group.rank());
  });
  check(ended == 2, "expected each rank to end its work once", 0);
}

// The copies of arrays on a device to host memory: calls keep their places, and those behind wait.
void a_call_is_not_begun_before_it_is_ready(const std::vector<int>& hosts) {
  std::vector<Rank> world = world_of(2, hosts);
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    std::atomic<bool> is_copied{false};
    std::vector<int64_t> first(3, 0), second(3, 1);
    Request late = sum_of(first);
    late.task = ready_when([&] { return is_copied.load(); });
    late.before = [&] { first.assign(3, 5); };
    const auto operation = group.calls().start(std::move(late), 60);
    const auto behind = group.calls().start(sum_of(second), 60);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    check(!operation->is_completed() && !behind->is_completed(), "expected them to wait", group.rank());
    is_copied = true;
    Request blocking = sum_of(second);
    blocking.task = std::make_shared<FunctionTask>();
    group.calls().run(blocking, 60, language);
    check(operation->is_completed() && behind->is_completed(), "expected the order of the calls", group.rank());
    check(first == std::vector<int64_t>(3, 10) && second == std::vector<int64_t>(3, 4), "expected sums", group.rank());
  });
}

void a_call_that_cannot_become_ready_ends_the_group() {
  std::vector<Rank> world = world_of(2, {0, 0});
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data(1, 1);
    Request request = sum_of(data);
    if (group.rank() == 1) request.task = ready_when([]() -> bool { throw std::runtime_error("illegal address"); });
    const auto operation = group.calls().start(std::move(request), 60);
    wait_for(*operation);
    const std::string text = operation->failure()->summary();
    check(group.end().is_completed(), "expected the group to have ended", group.rank());
    check(data[0] == 1, text.c_str(), group.rank());
    if (group.rank() == 1) check(text.find("illegal address") != std::string::npos, text.c_str(), 1);
  });
}

// Work on a device that cannot be started: an array was freed, for example.
void a_call_whose_end_throws_ends_the_group() {
  std::vector<Rank> world = world_of(2, {0, 0});
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data(1, 1);
    Request request = sum_of(data);
    request.task = started_by([&] {
      if (group.rank() == 1) throw std::runtime_error("illegal address");
    });
    const auto operation = group.calls().start(std::move(request), 60);
    wait_for(*operation);
    const std::string text = group.rank() == 1 ? operation->failure()->summary() : "";
    if (group.rank() == 1) check(text.find("illegal address") != std::string::npos, text.c_str(), 1);
    NoRuntime language;
    try {
      Request barrier;
      group.calls().run(barrier, 60, language);
      check(false, "expected the group to have ended", group.rank());
    } catch (const OperationFailed&) {
    }
  });
}

// A thread that has waited for a call may ask at once whether the group has failed.
void a_group_has_ended_before_a_call_that_fails_completes(const char* how) {
  const std::string reason = how;
  std::vector<Rank> world = world_of(2, {0, 0});
  Group& group = *world[0].group;
  std::vector<int64_t> data(1, 1);
  std::shared_ptr<GroupOperation> operation;
  std::atomic<bool> is_known{false};
  std::atomic<bool> completed_first{true};
  group.end().on_broken([&] { completed_first = operation->is_completed(); });
  Request request = sum_of(data);
  request.task = ready_when([&]() -> bool {
    if (is_known && reason == "throws") throw std::runtime_error("illegal address");
    return is_known;
  });
  operation = group.calls().start(std::move(request), reason == "deadline" ? 0.1 : 60);
  is_known = true;
  if (reason == "abort") world[1].group->abort();
  wait_for(*operation);
  check(operation->failure() != nullptr && !completed_first, "expected the group to end before its call", 0);
}

void a_receive_whose_end_throws_ends_the_group() {
  std::vector<Rank> world = world_of(2, {0, 0});
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    int64_t data = 1;
    if (group.rank() == 0)
      return static_cast<void>(group.messages().run({OpKind::kSend, &data, 1, Dtype::kInt64, 1, 3}, 60, language));
    MessageRequest request{OpKind::kRecv, &data, 1, Dtype::kInt64, 0, 3};
    request.task = started_by([] { throw std::runtime_error("illegal address"); });
    try {
      group.messages().run(request, 60, language);
      check(false, "expected a failure", 1);
    } catch (const OperationFailed& failed) {
      check(failed.failure.summary().find("illegal address") != std::string::npos, failed.failure.summary().c_str(), 1);
    }
    check(group.end().is_completed(), "expected the group to have ended", 1);
  });
}

// It starts work on a device, for example, and that may use messages.
void what_follows_a_receive_may_take_locks(const std::vector<int>& hosts) {
  constexpr int kRounds = 30;
  std::vector<Rank> world = world_of(2, hosts);
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    for (int round = 0; round < kRounds; ++round) {
      int64_t data = round, answer = 0;
      if (group.rank() == 0) {
        group.messages().run({OpKind::kSend, &data, 1, Dtype::kInt64, 1, 3}, 60, language);
        group.messages().run({OpKind::kRecv, &answer, 1, Dtype::kInt64, 1, 4}, 60, language);
        check(answer == round + 1, "expected the answer", 0);
        continue;
      }
      std::shared_ptr<GroupOperation> reply;
      MessageRequest request{OpKind::kRecv, &answer, 1, Dtype::kInt64, round % 3 == 0 ? kAnySource : 0, 3};
      request.task = started_by([&] {
        ++answer;
        reply = group.messages().start({OpKind::kSend, &answer, 1, Dtype::kInt64, 0, 4}, 60);
      });
      if (round % 2 == 0) {
        group.messages().run(request, 60, language);
      } else {
        const auto operation = group.messages().start(request, 60);
        while (operation->help() != Progress::kDone) std::this_thread::yield();
      }
      wait_for(*reply);
    }
  });
}

// An abort ends what the device does, and so the device has finished: that is no success.
void work_that_an_abort_has_ended_fails() {
  std::vector<Rank> world = world_of(1, {});
  Group& group = *world[0].group;
  std::atomic<bool> has_finished{false};
  std::shared_ptr<GroupOperation> work;
  group.end().on_broken([&] {
    has_finished = true;
    work->help();
  });
  work = group.devices().follow(collective(1), queued_until([&] { return has_finished.load(); }), 60);
  group.abort();
  wait_for(*work);
  check(work->failure() != nullptr, "expected a failure", 0);
}

}  // namespace

int main() {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    CASE("%s", text_of(hosts).c_str());
    RUN_TEST(messages_have_the_same_places_on_both_sides, hosts);
    RUN_TEST(a_call_is_not_begun_before_it_is_ready, hosts);
    RUN_TEST(what_follows_a_receive_may_take_locks, hosts);
  }
  RUN_TEST(work_ends_when_the_device_has_finished_and_in_order);
  RUN_TEST(a_look_beside_another_one_is_no_answer);
  RUN_TEST(the_next_call_reports_the_failure_of_a_blocking_one);
  RUN_TEST(a_call_that_waits_reports_the_failure_of_a_blocking_one);
  RUN_TEST(a_barrier_waits_for_the_work_of_collectives);
  for (const char* how : {"throws", "deadline", "abort"}) {
    CASE("%s", how);
    RUN_TEST(work_that_fails_ends_the_group, how);
  }
  for (const char* how : {"throws", "deadline", "abort"}) {
    CASE("%s", how);
    RUN_TEST(a_group_has_ended_before_a_call_that_fails_completes, how);
  }
  RUN_TEST(work_that_an_abort_has_ended_fails);
  RUN_TEST(a_call_that_cannot_become_ready_ends_the_group);
  RUN_TEST(a_call_whose_end_throws_ends_the_group);
  RUN_TEST(a_receive_whose_end_throws_ends_the_group);
}
