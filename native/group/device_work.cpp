#include "group/device_work.hpp"

#include <algorithm>

#include "group/group.hpp"

namespace procgroup {

std::shared_ptr<GroupOperation> DeviceWork::follow(const Descriptor& call, std::shared_ptr<Task> task, double seconds,
                                                   bool is_unawaited, std::optional<Recording> recording) {
  if (recording) recording->queue();
  const auto operation =
      std::make_shared<DeviceOperation>(group_, call, std::move(task), seconds, is_unawaited, std::move(recording));
  bool is_watched = false;
  {
    const std::lock_guard lock(mutex_);
    is_watched = !group_.end().is_completed();  // under the mutex: what is added after leave() would never end
    if (is_watched) queues_[is_message(call.op) ? std::pair(call.op, call.root) : kCollectives].push_back(operation);
    is_used_.store(true, std::memory_order_release);
  }
  if (!is_watched) operation->give_up(*group_.end().broken());
  group_.engine().progress().notify();
  return operation;
}

void DeviceWork::watch_replays(const Descriptor& call, std::shared_ptr<Task> task, double seconds) {
  {
    const std::lock_guard lock(mutex_);
    if (group_.end().is_completed()) return;  // under the mutex, as in follow()
    captured_.push_back({call, std::move(task), seconds});
    group_.engine().record().set_replays(group_.id(), replays_);
    is_used_.store(true, std::memory_order_release);
  }
  group_.engine().progress().notify();
}

// Follow the calls of graphs that have begun to run for long, and forget those whose graphs are gone. Whether there are
// any.
bool DeviceWork::follow_replays() {
  std::vector<std::shared_ptr<Task>> gone;  // let go of without the mutex: that may run Python
  const std::lock_guard lock(mutex_);
  if (captured_.empty()) return false;
  std::vector<int> ignored;
  RunningReplays running{.are_all = true};
  for (CapturedCall& one : captured_) {
    if (group_.end().is_completed()) break;
    Task::State state = Task::State::kQueued;  // what it throws here, it throws again when it is followed
    failure_of([&] { state = one.task->test(ignored); });
    if (state == Task::State::kCompleted) gone.push_back(one.task);
    if (state == Task::State::kPending) running.are_all = false;
    if (state == Task::State::kQueued) running.calls.push_back(one.call.sequence);
    const std::shared_ptr<GroupOperation> followed = one.followed.lock();
    if (state != Task::State::kQueued || (followed && !followed->is_completed())) continue;
    const auto operation =
        std::make_shared<DeviceOperation>(group_, one.call, one.task, one.seconds, true, std::optional<Recording>());
    one.followed = operation;
    queues_[kReplays].push_back(operation);
  }
  std::erase_if(captured_, [&](const CapturedCall& one) { return std::ranges::find(gone, one.task) != gone.end(); });
  if (group_.end().is_completed()) running = {};  // their end may be that of the group
  if (running != replays_) group_.engine().record().set_replays(group_.id(), replays_ = std::move(running));
  return !captured_.empty() && !group_.end().is_completed();
}

// Of collectives: a barrier does not wait for messages.
bool DeviceWork::has_collectives() {
  if (!is_used_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  const auto queue = queues_.find(kCollectives);
  return queue != queues_.end() && !queue->second.empty();
}

Progress DeviceWork::advance() {
  if (!is_used_.load(std::memory_order_acquire)) return Progress::kDone;
  Progress progress = follow_replays() ? Progress::kWaiting : Progress::kDone;
  std::vector<std::pair<Key, std::shared_ptr<GroupOperation>>> firsts;  // let go of without the mutex, as above
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, queue] : queues_)
      if (!queue.empty()) firsts.emplace_back(key, queue.front());
  }
  for (auto& [key, first] : firsts) {
    while (first && first->advance() == Progress::kDone) {
      std::shared_ptr<GroupOperation> next;
      {
        const std::lock_guard lock(mutex_);
        auto& queue = queues_[key];
        queue.pop_front();
        if (!queue.empty()) next = queue.front();
      }
      first = std::move(next);
      progress = Progress::kMoved;
    }
    if (first) progress = std::max(progress, Progress::kWaiting);
  }
  if (progress == Progress::kMoved) group_.engine().completed();
  return progress;
}

bool DeviceWork::is_empty() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(queues_, [](const auto& one) { return one.second.empty(); });
}

std::shared_ptr<GroupOperation> DeviceWork::first_collective() const {
  const std::lock_guard lock(mutex_);
  const auto queue = queues_.find(kCollectives);
  return queue == queues_.end() || queue->second.empty() ? nullptr : queue->second.front();
}

bool DeviceWork::has_unfinished() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(queues_, [](const auto& one) {
    return one.first != kReplays &&
           std::ranges::any_of(one.second, [](const auto& call) { return !call->is_completed(); });
  });
}

int64_t DeviceWork::longest_sleep_ns() const {
  const std::lock_guard lock(mutex_);
  const bool is_empty = std::ranges::all_of(queues_, [](const auto& one) { return one.second.empty(); });
  return !is_empty || !captured_.empty() ? DeviceOperation::kSleepNs : kAnySleepNs;
}

bool DeviceWork::has_other_than(const Operation& waited) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      queues_, [&](const auto& one) { return !one.second.empty() && one.second.front().get() != &waited; });
}

// Those behind the first of a queue end after it, but for their deadlines and the end of the group.
std::vector<std::shared_ptr<GroupOperation>> DeviceWork::pending() const {
  std::vector<std::shared_ptr<GroupOperation>> pending;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, queue] : queues_)
    for (const std::shared_ptr<GroupOperation>& work : queue)
      if (work == queue.front() || group_.end().is_completed() || work->deadline().passed()) pending.push_back(work);
  return pending;
}

void DeviceWork::forget_captured() {
  std::vector<CapturedCall> captured;  // let go of without the mutex: that may run Python
  const std::lock_guard lock(mutex_);
  captured = std::exchange(captured_, {});
  if (!captured.empty()) group_.engine().record().set_replays(group_.id(), {});  // this rank looks at them no more
}

}  // namespace procgroup
