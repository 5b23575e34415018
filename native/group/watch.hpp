// Watches the calls of a group: which members each awaits, what ends it from outside, and what the error then says.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/members.hpp"
#include "liveness/deadlock.hpp"
#include "runtime/wait_report.hpp"
#include "runtime/waiting.hpp"

namespace procgroup {

class GroupOperation;

class Watch {
 public:
  Watch(Group& group, Members& members);
  Watch(const Watch&) = delete;

  // Advance the operation until it has completed; return its failure. `awaited`: as in DeadlockDetector::examine.
  std::optional<Failure> complete(Operation& operation, const Descriptor& call,
                                  const std::function<std::optional<Awaited>()>& awaited, double seconds,
                                  LanguageRuntime& language);
  // Examine an operation that the progress thread advances, and give it up if something has ended it.
  void examine_running(GroupOperation& operation);
  // What ends an operation from outside: the end of a member, an abort, its deadline.
  std::optional<Failure> what_ends(const GroupOperation& operation);
  std::optional<Failure> find_deadlock(DeadlockDetector& watch, const Operation& operation,
                                       const std::function<std::optional<Awaited>()>& awaited,
                                       LanguageRuntime& language);
  std::optional<Awaited> awaited(const Operation& operation, const Descriptor& call) const;
  std::optional<Awaited> unless_failed(const Operation& operation, const Descriptor& call,
                                       std::optional<Awaited> awaited) const;
  void record_awaited(const Descriptor& call, const std::vector<int>& missing) const;

  // The cause of a failed call, as far as that is known, as this rank presents it.
  Failure cause_of(Failure failure) const;
  // The failure as this rank presents it. `awaited`: the ranks for which the call has waited.
  Failure present(Failure failure, std::vector<int> awaited = {}) const;
  // Add what the missing ranks of a timeout are doing; before it is posted, also the leaders that may not have relayed.
  void explain(Failure& failure, bool has_world_ranks = false);
  void add_relays(Failure& failure, const Descriptor& call);
  // The members of this host whose processes are stopped, for a transfer that does not say for whom it waits.
  std::vector<int> stopped_members() const;

 private:
  std::vector<int> world_ranks(std::vector<int> members) const;
  std::optional<Failure> examine(const Operation& operation, const Descriptor& call) const;
  std::optional<Failure> examine_relays(const std::vector<int>& missing, const Descriptor& call) const;
  bool can_relay(const Descriptor& call) const;
  std::vector<int> explained_peers(const Timeout& timeout, bool has_world_ranks) const;
  void look_at_calls(const std::vector<int>& peers);
  void look_at_replays(Timeout& timeout, const Descriptor& call);
  void name_relays(Timeout& timeout, const Descriptor& call) const;
  void report_wait(WaitReport& report, const Operation& operation, const Descriptor& call, double seconds) const;

  Group& group_;
  Engine& engine_;
  Members& members_;
  std::mutex seen_mutex_;
  std::map<int, std::string> seen_calls_;  // by world rank; guarded by seen_mutex_
};

}  // namespace procgroup
