// What ends a wait: also of an operation that moves without end.
#include "runtime/waiting.hpp"

#include <chrono>
#include <thread>

#include "tests/check.hpp"

namespace procgroup::testing {
namespace {

// Moves at every look, as a message does while other ranks send, and never ends by itself.
class Restless final : public Operation {
 public:
  Progress advance() override { return is_completed() ? Progress::kDone : Progress::kMoved; }
  std::vector<int> missing() const override { return {1}; }
};

class Bench final : public Waiter {
 public:
  void sleep(int64_t, const std::function<bool()>& ready) override {
    if (!ready()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::atomic<uint32_t>& news() const override { return news_; }

 private:
  std::atomic<uint32_t> news_{0};
};

FailureKind end_of_a_restless_one(double seconds, const Look& examine) {
  Restless operation;
  Bench bench;
  NoRuntime language;
  WaitBudget budget(WaitPolicy{}, seconds);
  wait(operation, budget, bench, language, examine);
  CHECK(operation.is_completed() && operation.failure() != nullptr);
  return operation.failure()->kind();
}

std::optional<Failure> nothing(const Operation&) { return std::nullopt; }

void what_moves_past_its_deadline_is_cancelled() {
  CHECK(end_of_a_restless_one(0.001, nothing) == FailureKind::kTimeout);
}

void what_moves_for_a_lost_rank_is_cancelled() {
  CHECK(end_of_a_restless_one(3600, [](const Operation&) { return Lost{}; }) == FailureKind::kLost);
}

class Ending final : public Operation {
 public:
  explicit Ending(Deadline end) : end_(end) {}
  Progress advance() override {
    if (is_completed()) return Progress::kDone;
    if (!end_.passed()) return Progress::kMoved;
    finish();
    return Progress::kDone;
  }
  std::vector<int> missing() const override { return {}; }

 private:
  const Deadline end_;
};

// As when one peer after the other is seen to have left before what it sent is read.
void a_loss_that_a_later_look_does_not_find_is_none() {
  Ending operation(Deadline::after(0.8));
  const Deadline again = Deadline::after(0.4);
  int losses = 0;
  const auto examine = [&](const Operation&) -> std::optional<Failure> {
    if (losses == 2 || (losses == 1 && !again.passed())) return std::nullopt;
    ++losses;
    return Lost{};
  };
  Bench bench;
  NoRuntime language;
  WaitBudget budget(WaitPolicy{}, 3600.0);
  wait(operation, budget, bench, language, examine);
  CHECK(losses == 2 && operation.is_completed() && operation.failure() == nullptr);
}

// Work.wait(timeout) of an operation that the progress thread advances, too: it goes on after the wait.
void a_wait_that_only_helps_ends_at_its_deadline_though_the_operation_moves() {
  Restless operation;
  Bench bench;
  NoRuntime language;
  WaitPolicy policy;
  policy.is_helping = true;
  policy.slice_ns = 1'000'000;
  const Deadline deadline = Deadline::after(0.001);
  WaitBudget budget(policy, deadline);
  int late_looks = 0;
  const auto look = [&](const Operation&) -> std::optional<Failure> {
    late_looks += deadline.passed() ? 1 : 0;
    return std::nullopt;
  };
  const std::optional<Failure> end = wait(operation, budget, bench, language, look);
  CHECK(end && end->is<Timeout>() && !operation.is_completed());
  CHECK(late_looks <= 1);
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(what_moves_past_its_deadline_is_cancelled);
  RUN_TEST(what_moves_for_a_lost_rank_is_cancelled);
  RUN_TEST(a_loss_that_a_later_look_does_not_find_is_none);
  RUN_TEST(a_wait_that_only_helps_ends_at_its_deadline_though_the_operation_moves);
}
