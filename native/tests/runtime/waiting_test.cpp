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

Failure::Kind end_of_a_restless_one(double seconds, const Examine& examine) {
  Restless operation;
  Bench bench;
  NoRuntime language;
  drive(operation, seconds, WaitPolicy{}, bench, language, examine);
  CHECK(operation.is_completed() && operation.failure() != nullptr);
  return operation.failure()->kind;
}

std::optional<Failure> nothing(const Operation&) { return std::nullopt; }

void what_moves_past_its_deadline_is_cancelled() {
  CHECK(end_of_a_restless_one(0.001, nothing) == Failure::Kind::kTimeout);
}

void what_moves_for_a_lost_rank_is_cancelled() {
  CHECK(end_of_a_restless_one(3600, [](const Operation&) { return Failure{.kind = Failure::Kind::kLost}; }) ==
        Failure::Kind::kLost);
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(what_moves_past_its_deadline_is_cancelled);
  RUN_TEST(what_moves_for_a_lost_rank_is_cancelled);
}
