// Calls whose bytes another backend moves: it sees a call only once all ranks agree, and what ends a wait ends its
// calls.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "group/group_operation.hpp"
#include "tests/engine_fixture.hpp"
#include "tests/function_task.hpp"

using namespace procgroup;

namespace {

std::atomic<int64_t> live_blocks{0};

}  // namespace

#ifndef __SANITIZE_ADDRESS__  // which has operators of its own

void* operator new(size_t bytes) {
  ++live_blocks;
  if (void* block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept {
  if (block != nullptr) --live_blocks;
  std::free(block);
}
void operator delete(void* block, size_t) noexcept { operator delete(block); }
#endif

namespace {

// A backend of the ranks of this process: each shows its array, and adds those of the others once all are shown.
class Board {
 public:
  explicit Board(int size) : shown_(static_cast<size_t>(size)) {}

  FunctionTask::Move transfer(int rank, std::vector<int64_t>& data) {
    started_ = false;
    return [this, rank, &data, begun = std::make_shared<bool>(false)](int, uint64_t, std::vector<int>&) {
      const std::lock_guard lock(mutex_);
      started_ = true;
      if (!std::exchange(*begun, true)) {
        shown_[static_cast<size_t>(rank)] = data;
        ++count_;
      }
      if (count_ < static_cast<int>(shown_.size())) return false;
      for (size_t index = 0; index < data.size(); ++index) {
        data[index] = 0;
        for (const std::vector<int64_t>& other : shown_) data[index] += other[index];
      }
      return true;
    };
  }
  bool started() const { return started_; }

 private:
  std::mutex mutex_;
  std::vector<std::vector<int64_t>> shown_;
  int count_ = 0;
  std::atomic<bool> started_{false};
};

Request external_request(std::vector<int64_t>& data, FunctionTask::Move transfer) {
  Request request = request_for(OpKind::kAllReduce, data);
  request.descriptor.external = true;
  request.task = moved_by(std::move(transfer));
  return request;
}

Failure failure_of(Group& group, Request request, double seconds = 60) {
  NoRuntime language;
  try {
    group.calls().run(request, seconds, language);
  } catch (const OperationFailed& failed) {
    return failed.failure;
  }
  check(false, "expected a failure", group.rank());
  std::abort();
}

std::vector<Rank> world_of(int size, const std::vector<int>& hosts) {
  return make_world(size, ReadingRanges::for_this_processor(), kTiny, hosts);
}

void a_call_is_moved_by_the_backend(const std::vector<int>& hosts, bool is_async) {
  std::vector<Rank> world = world_of(3, hosts);
  for (const size_t count : {size_t{1}, size_t{5000}}) {
    CASE("%zu elements", count);
    Board board(3);
    in_all_ranks(world, [&](Group& group) {
      std::vector<int64_t> data = values(group.rank(), count);
      Request request = external_request(data, board.transfer(group.rank(), data));
      NoRuntime language;
      if (is_async) {
        const auto operation = group.calls().start(std::move(request), 60);
        while (!operation->is_completed()) std::this_thread::yield();
        check(operation->failure() == nullptr, "expected to end well", group.rank());
      } else {
        group.calls().run(request, 60, language);
      }
      for (size_t index = 0; index < count; ++index) check(data[index] == sum(3, index), "wrong sum", group.rank());
    });
  }
}

void ranks_that_differ_reach_no_backend(const std::vector<int>& hosts) {
  std::vector<Rank> world = world_of(3, hosts);
  Board board(3);
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), group.rank() == 2 ? 6 : 5);
    const Failure failure = failure_of(group, external_request(data, board.transfer(group.rank(), data)));
    check(failure.is<Mismatch>(), failure.summary().c_str(), group.rank());
    check(failure.as<Mismatch>()->calls[2] == "all_reduce(SUM) of 6 int64", failure.as<Mismatch>()->calls[2].c_str(),
          group.rank());
  });
  check(!board.started(), "expected no transfer to start", 0);
}

// Rank 1's backend throws; the others' backends wait for it.
void what_a_backend_throws_ends_the_call_everywhere(const std::vector<int>& hosts, bool is_async) {
  std::vector<Rank> world = world_of(3, hosts);
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 5);
    const bool throws = group.rank() == 1;
    Request request = external_request(data, [throws](int, uint64_t, std::vector<int>&) -> bool {
      if (throws) throw std::runtime_error("out of ink");
      return false;
    });
    Failure failure = Aborted{};
    if (is_async) {
      const auto operation = group.calls().start(std::move(request), 60);
      while (!operation->is_completed()) std::this_thread::yield();
      failure = *operation->failure();
    } else {
      failure = failure_of(group, std::move(request));
    }
    const FailureKind expected = throws ? FailureKind::kBroken : FailureKind::kFailed;
    check(failure.kind() == expected, failure.summary().c_str(), group.rank());
    check(failure.summary().find("out of ink") != std::string::npos, failure.summary().c_str(), group.rank());
  });
}

void a_transfer_that_does_not_end_is_ended_at_the_deadline() {
  std::vector<Rank> world = world_of(1, {});
  std::vector<int64_t> data(3);
  const Failure failure =
      failure_of(*world[0].group, external_request(data, [](int, uint64_t, std::vector<int>&) { return false; }), 0.1);
  const std::string text = "its time limit of 0.1 s passed while it waited for its backend, which does not name";
  check(failure.summary().starts_with(text) && failure.missing().empty(), failure.summary().c_str(), 0);
}

// Rank 1's backend waits for nobody; those of the others wait for it, and say so.
void the_ranks_that_a_backend_waits_for_are_named_at_the_deadline(const std::vector<int>& hosts, bool is_async) {
  std::vector<Rank> world = world_of(3, hosts);
  std::atomic<int> failed{0};
  std::atomic<int> present{0};
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 5);
    for (++present; present != 3;) std::this_thread::yield();  // who starts late is missing for another reason
    if (group.rank() == 1) {
      failure_of(group, external_request(data, [&](int, uint64_t, std::vector<int>&) { return false; }));
      return;
    }
    Request request = external_request(data, [](int, uint64_t, std::vector<int>& awaited) {
      awaited = {1};
      return false;
    });
    Failure failure = Aborted{};
    if (is_async) {
      const auto operation = group.calls().start(std::move(request), 1);
      while (!operation->is_completed()) std::this_thread::yield();
      failure = *operation->failure();
    } else {
      failure = failure_of(group, std::move(request), 1);
    }
    check(failure.missing() == std::vector{1}, failure.summary().c_str(), group.rank());
    if (failure.is<Timeout>()) ++failed;
  });
  check(failed != 0, "expected a deadline", 0);
}

// An all_to_all of one element to each rank: its descriptor says nothing of its size.
Request exchange_of(std::vector<int64_t>& given, std::vector<int64_t>& taken) {
  Request request;
  request.descriptor.op = OpKind::kAllToAll;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.external = true;
  for (int64_t& one : given) request.inputs.push_back({&one, 1});
  for (int64_t& one : taken) request.outputs.push_back({&one, 1});
  return request;
}

// Rank 1's bytes have not moved, those of the others have. What moves only while it is advanced is advanced meanwhile.
void ranks_of_several_hosts_wait_until_all_bytes_have_moved(OpKind op, const std::vector<int>& hosts, bool is_async,
                                                            bool is_polled) {
  std::vector<Rank> world = world_of(3, hosts);
  std::atomic<int> moved{0};
  std::atomic<int> completed{0};
  std::atomic<int> later_looks{0};
  std::atomic<bool> may_move{false};
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 3);
    std::vector<int64_t> taken(3);
    const bool is_last = group.rank() == 1;
    Request request = op == OpKind::kAllToAll ? exchange_of(data, taken) : external_request(data, {});
    const auto task = moved_by([&, is_last, has_moved = std::make_shared<bool>(false)](auto...) {
      if (*has_moved)
        ++later_looks;
      else if ((*has_moved = !is_last || may_move))
        ++moved;
      return *has_moved;
    });
    if (is_polled) task->sleep_ns = 0;
    request.task = task;
    std::thread later;
    if (is_last)
      later = std::thread([&] {
        while (moved < 2 || (is_polled && later_looks == 0)) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        check(completed == 0, "expected all ranks to wait for rank 1", 1);
        check((later_looks > 0) == is_polled, "expected only a polled transfer to be advanced further", 1);
        may_move = true;
      });
    NoRuntime language;
    if (is_async) {
      const auto operation = group.calls().start(std::move(request), 60);
      while (!operation->is_completed()) std::this_thread::yield();
      check(operation->failure() == nullptr, "expected to end well", group.rank());
    } else {
      group.calls().run(request, 60, language);
    }
    ++completed;
    if (is_last) later.join();
  });
}

void a_call_without_bytes_is_not_confirmed() {
  std::vector<Rank> world = world_of(2, {0, 1});
  std::atomic<bool> has_ended{false};
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data;
    const bool is_first = group.rank() == 0;
    NoRuntime language;
    Request request = external_request(
        data, [&, is_first](int, uint64_t, std::vector<int>&) { return is_first || has_ended.load(); });
    group.calls().run(request, 60, language);
    if (is_first) has_ended = true;
  });
}

// Rank 1's backend throws when the others have moved their bytes.
void what_a_backend_throws_at_last_ends_the_call_everywhere(const std::vector<int>& hosts, bool is_async) {
  std::vector<Rank> world = world_of(3, hosts);
  std::atomic<int> moved{0};
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 5);
    const bool throws = group.rank() == 1;
    Request request = external_request(data, [&, throws](int, uint64_t, std::vector<int>&) {
      if (!throws) ++moved;
      if (throws && moved == 2) throw std::runtime_error("out of ink");
      return !throws;
    });
    Failure failure = Aborted{};
    if (is_async) {
      const auto operation = group.calls().start(std::move(request), 60);
      while (!operation->is_completed()) std::this_thread::yield();
      check(operation->failure() != nullptr, "expected a failure", group.rank());
      failure = *operation->failure();
    } else {
      failure = failure_of(group, std::move(request));
    }
    const FailureKind expected = throws ? FailureKind::kBroken : FailureKind::kFailed;
    check(failure.kind() == expected, failure.summary().c_str(), group.rank());
    check(failure.summary().find("out of ink") != std::string::npos, failure.summary().c_str(), group.rank());
  });
}

// Rank 1's backend does not move its bytes, and those of the others do not say so.
void a_rank_that_does_not_confirm_is_named_at_the_deadline() {
  std::vector<Rank> world = world_of(2, {0, 1});
  in_all_ranks(world, [&](Group& group) {
    std::vector<int64_t> data = values(group.rank(), 5);
    const bool is_first = group.rank() == 0;
    const Failure failure =
        failure_of(group, external_request(data, [is_first](int, uint64_t, std::vector<int>&) { return is_first; }),
                   is_first ? 0.2 : 60);
    if (!is_first) return;
    check(failure.is<Timeout>(), failure.summary().c_str(), 0);
    check(failure.missing() == std::vector{1}, failure.summary().c_str(), 0);
  });
}

// Members leave as soon as they have completed the call; the others still wait for one another.
void ranks_that_leave_after_the_call_fail_none() {
  for (int turn = 0; turn < 100; ++turn)
    for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 2}}) {
      CASE("turn %d, %s", turn, text_of(hosts).c_str());
      std::vector<Rank> world = world_of(3, hosts);
      std::vector<std::thread> threads;
      for (Rank& rank : world)
        threads.emplace_back([&rank] {
          NoRuntime language;
          std::vector<int64_t> data = values(rank.group->rank(), 5);
          Request request = external_request(data, [](int, uint64_t, std::vector<int>&) { return true; });
          rank.group->calls().run(request, 60, language);
          rank.group->leave();
          rank.engine->shutdown();
        });
      for (std::thread& thread : threads) thread.join();
    }
}

// Each message has a tag of its own; nothing is left of it when it has been moved.
void messages_that_were_moved_take_no_memory(const std::vector<int>& hosts) {
  std::vector<Rank> world = world_of(2, hosts);
  uint64_t tag = 0;
  const auto exchange = [&](uint64_t messages) {
    const uint64_t end = tag + messages;
    in_all_ranks(world, [&](Group& group) {
      NoRuntime language;
      int64_t data = 0;
      MessageRequest request{
          group.rank() == 0 ? OpKind::kSend : OpKind::kRecv, &data, 1, Dtype::kInt64, 1 - group.rank(), 0};
      request.task = std::make_shared<FunctionTask>();
      request.external = true;
      for (request.tag = tag; request.tag < end; ++request.tag) group.messages().run(request, 60, language);
    });
    tag = end;
    return live_blocks.load();
  };
  const int64_t before = exchange(1000);
  const int64_t grown = exchange(2000) - before;
  check(grown < 500, ("2000 messages left " + std::to_string(grown) + " blocks").c_str(), 0);
}

// A message of rank 0 to rank 1; both threads of a receive advance it, the caller's and the progress thread.
void a_message_is_moved_by_the_backend(const std::vector<int>& hosts, int source, size_t count, bool is_async) {
  std::vector<Rank> world = world_of(2, hosts);
  std::atomic<int> sent{0};
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    std::vector<int64_t> data(count);
    MessageRequest request{OpKind::kSend, data.data(), 4, Dtype::kInt64, 1, 9};
    request.task = moved_by([&](int peer, uint64_t, std::vector<int>&) {
      check(peer == 1 - group.rank(), "wrong peer", group.rank());
      if (group.rank() == 0) sent = 1;
      return sent == 1;
    });
    request.external = true;
    if (group.rank() == 0) return static_cast<void>(group.messages().run(request, 60, language));
    request.op = OpKind::kRecv;
    request.count = count;
    request.peer = source;
    try {
      if (is_async) {
        const auto operation = group.messages().start(request, 60);
        const auto failure = group.calls().await(*operation, Deadline::never(), language).failure;
        if (failure) throw OperationFailed{*failure, operation->call()};
        check(operation->source() == 0, "wrong source", 1);
      } else {
        check(group.messages().run(request, 60, language) == 0, "wrong source", 1);
      }
      check(count == 4, "expected a mismatch", 1);
    } catch (const OperationFailed& failed) {
      check(count != 4, failed.failure.summary().c_str(), 1);
      check(failed.failure.is<Mismatch>(), failed.failure.summary().c_str(), 1);
      check(failed.failure.as<Mismatch>()->calls[0] == "send of 4 int64 to rank 1",
            failed.failure.as<Mismatch>()->calls[0].c_str(), 1);
    }
  });
}

// A task in Python takes the interpreter's lock when it is cancelled, and a thread that has that lock may wait for the
// mutex of messages.
void a_message_is_cancelled_without_the_mutex_of_messages(const std::vector<int>& hosts) {
  std::vector<Rank> world = world_of(2, hosts);
  std::atomic<bool> was_free{false};
  in_all_ranks(world, [&](Group& group) {
    if (group.rank() == 1) return;
    NoRuntime language;
    int64_t data = 0;
    MessageRequest request{OpKind::kRecv, &data, 1, Dtype::kInt64, 1, 0};
    const auto task = std::make_shared<FunctionTask>();
    task->on_cancel = [&] {
      std::thread([&] {
        const Deadline deadline = Deadline::after(10);  // the progress thread takes it for moments
        while (!was_free && !deadline.passed())
          was_free = std::unique_lock(group.engine().messages_mutex(), std::try_to_lock).owns_lock();
      }).join();
    };
    request.task = task;
    request.external = true;
    try {
      group.messages().run(request, 0.05, language);
      check(false, "expected a timeout", 0);
    } catch (const OperationFailed& failed) {
      check(failed.failure.is<Timeout>(), failed.failure.summary().c_str(), 0);
    }
  });
  check(was_free, "cancelled with the mutex", 0);
}

}  // namespace

int main() {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0, 0}, std::vector<int>{0, 1, 1}, std::vector<int>{0, 1, 2}}) {
    CASE("%s", text_of(hosts).c_str());
    for (const bool is_async : {false, true}) {
      CASE("async %d", is_async);
      RUN_TEST(a_call_is_moved_by_the_backend, hosts, is_async);
      RUN_TEST(what_a_backend_throws_ends_the_call_everywhere, hosts, is_async);
      RUN_TEST(the_ranks_that_a_backend_waits_for_are_named_at_the_deadline, hosts, is_async);
    }
    RUN_TEST(ranks_that_differ_reach_no_backend, hosts);
  }
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 2}})
    for (const bool is_async : {false, true}) {
      CASE("%s, async %d", text_of(hosts).c_str(), is_async);
      for (const bool is_polled : {false, true})
        for (const OpKind op : {OpKind::kAllReduce, OpKind::kAllToAll}) {
          CASE("%s, polled %d", op_name(op), is_polled);
          RUN_TEST(ranks_of_several_hosts_wait_until_all_bytes_have_moved, op, hosts, is_async, is_polled);
        }
      RUN_TEST(what_a_backend_throws_at_last_ends_the_call_everywhere, hosts, is_async);
    }
  RUN_TEST(a_call_without_bytes_is_not_confirmed);
  RUN_TEST(a_rank_that_does_not_confirm_is_named_at_the_deadline);
  RUN_TEST(ranks_that_leave_after_the_call_fail_none);
  RUN_TEST(a_transfer_that_does_not_end_is_ended_at_the_deadline);
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    CASE("%s", text_of(hosts).c_str());
    RUN_TEST(messages_that_were_moved_take_no_memory, hosts);
    RUN_TEST(a_message_is_cancelled_without_the_mutex_of_messages, hosts);
    for (const int source : {0, kAnySource})
      for (const size_t count : {size_t{4}, size_t{5}})
        for (const bool is_async : {false, true}) {
          CASE("source %d, %zu elements, async %d", source, count, is_async);
          RUN_TEST(a_message_is_moved_by_the_backend, hosts, source, count, is_async);
        }
  }
}
