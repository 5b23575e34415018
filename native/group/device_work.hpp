// The work that a group's calls have queued on a device, and the calls in graphs of such work.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "group/group_operation.hpp"
#include "runtime/flight_record.hpp"

namespace procgroup {

class DeviceWork {
 public:
  explicit DeviceWork(Group& group) : group_(group) {}
  DeviceWork(const DeviceWork&) = delete;

  // Watch over a task that a call, which has ended, has queued on a device, until it has completed. It fails, and ends
  // the group, at its deadline, when a member is lost, and with the group.
  std::shared_ptr<GroupOperation> follow(const Descriptor& call, std::shared_ptr<Task> task, double seconds,
                                         bool is_unawaited = false, std::optional<Recording> recording = {});
  // Watch over a task that is part of a graph of work on a device, until the graph is gone. When it runs for long, it
  // fails as the task of a call does that has begun then.
  void watch_replays(const Descriptor& call, std::shared_ptr<Task> task, double seconds);

  bool is_empty() const;
  // Whether work of collectives goes on: a barrier does not wait for messages.
  bool has_collectives();
  // The first of them; null where there is none.
  std::shared_ptr<GroupOperation> first_collective() const;
  // Whether calls go on other than those in graphs, which the program may launch at any time.
  bool has_unfinished() const;
  // As the functions of Source.
  Progress advance();
  std::vector<std::shared_ptr<GroupOperation>> pending() const;
  int64_t longest_sleep_ns() const;
  bool has_other_than(const Operation& waited) const;
  // The calls in graphs: the group has ended.
  void forget_captured();

 private:
  // A message's operation and peer, or one of the next two.
  using Key = std::pair<OpKind, int>;
  static constexpr Key kCollectives{OpKind::kBarrier, -1};
  static constexpr Key kReplays{OpKind::kBarrier, -2};
  struct CapturedCall {
    Descriptor call;
    std::shared_ptr<Task> task;
    double seconds;
    std::weak_ptr<GroupOperation> followed{};  // while it runs for long
  };

  bool follow_replays();

  Group& group_;
  std::atomic<bool> is_used_{false};  // whether there is anything here, without the mutex
  mutable std::mutex mutex_;          // guards what follows
  // Those of a queue complete in order, so only the first is looked at.
  std::map<Key, std::deque<std::shared_ptr<GroupOperation>>> queues_;
  std::vector<CapturedCall> captured_;
  RunningReplays replays_{.are_all = true};  // of these, as the flight record has them
};

}  // namespace procgroup
