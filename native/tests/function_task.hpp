// Tasks that functions move.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ops/task.hpp"

namespace procgroup {

class FunctionTask final : public Task {
 public:
  // Whether all has moved. A task without this function has, when it is started.
  using Move = std::function<bool(int root, uint64_t number, std::vector<int>& awaited)>;
  Move move;
  std::function<bool()> is_ready;
  // With it, the task goes on, on a device, until that returns true.
  std::function<bool()> has_ended;
  std::function<void()> on_start;
  std::function<void()> on_cancel;
  int64_t sleep_ns = kTaskSleepNs;

  bool ready() override { return !is_ready || is_ready(); }
  void start(int root, uint64_t number) override {
    root_ = root;
    number_ = number;
    if (on_start) on_start();
  }
  State test(std::vector<int>& awaited) override {
    if (move && !move(root_, number_, awaited)) return State::kPending;
    return has_ended && !has_ended() ? State::kQueued : State::kCompleted;
  }
  void cancel() override {
    if (on_cancel) on_cancel();
  }
  int64_t longest_sleep_ns() const override { return sleep_ns; }

 private:
  int root_ = -1;
  uint64_t number_ = 0;
};

inline std::shared_ptr<FunctionTask> moved_by(FunctionTask::Move move) {
  auto task = std::make_shared<FunctionTask>();
  task->move = std::move(move);
  return task;
}

inline std::shared_ptr<FunctionTask> ready_when(std::function<bool()> is_ready) {
  auto task = std::make_shared<FunctionTask>();
  task->is_ready = std::move(is_ready);
  return task;
}

inline std::shared_ptr<FunctionTask> queued_until(std::function<bool()> has_ended) {
  auto task = std::make_shared<FunctionTask>();
  task->has_ended = std::move(has_ended);
  return task;
}

inline std::shared_ptr<FunctionTask> started_by(std::function<void()> on_start) {
  auto task = std::make_shared<FunctionTask>();
  task->on_start = std::move(on_start);
  return task;
}

}  // namespace procgroup
