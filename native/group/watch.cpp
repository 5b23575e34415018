#include "group/watch.hpp"

#include <algorithm>
#include <utility>

#include "base/diagnostics.hpp"
#include "group/group.hpp"
#include "runtime/call_report.hpp"

namespace procgroup {

Watch::Watch(Group& group, Members& members) : group_(group), engine_(group.engine()), members_(members) {}

std::vector<int> Watch::world_ranks(std::vector<int> members) const {
  for (int& member : members) member = group_.world_rank(member);
  return members;
}

std::optional<Failure> Watch::examine(const Operation& operation, const Descriptor& call) const {
  using How = MemberEnd::How;
  if (engine_.aborted()) return Aborted{};
  const std::vector<int> missing = operation.missing();
  std::optional<MemberEnd> found;
  for (int member = 0; member < group_.size(); ++member) {
    const bool is_awaited = std::ranges::find(missing, member) != missing.end();
    if (member == group_.rank() || !(operation.depends_on_all() || is_awaited)) continue;
    std::optional<MemberEnd> end = members_.end_of(member, operation.outlives_peer());
    const bool has_done_its_part = end && end->how == How::kLeft && (!is_awaited || operation.outlives_peer());
    if (!end || !end->ends(call) || has_done_its_part) continue;
    // A lost rank is the cause of what other ranks report.
    if (end->how <= How::kLost) return present(std::move(end->why));
    if (!found || (end->how == How::kDisconnected && found->how != How::kDisconnected)) found = std::move(end);
  }
  if (found) return present(std::move(found->why), found->how == How::kFailed ? missing : std::vector<int>{});
  if (std::optional<Failure> failure = examine_relays(missing, call)) return failure;
  return group_.end().broken();
}

// If a leader has left before it relayed a missing member's announcement, that announcement never comes.
std::optional<Failure> Watch::examine_relays(const std::vector<int>& missing, const Descriptor& call) const {
  if (!members_.spans_hosts() || is_message(call.op)) return std::nullopt;
  const Topology& topology = members_.state()->topology;
  for (const int member : missing) {
    const int leader = topology.leader_of(topology.is_leader() ? topology.host_of(member) : topology.own_host());
    if (topology.is_local(member) || leader == member) continue;
    const std::optional<MemberEnd> end = members_.end_of(leader);
    if (!end || end->how != MemberEnd::How::kLeft || !end->ends(call)) continue;
    // It may have relayed before it left.
    if (members_.state()->has_announced(member, call.sequence) || can_relay(call)) continue;
    std::optional<MemberEnd> lost = members_.end_of(member, true);
    const bool is_lost = lost && lost->how == MemberEnd::How::kDisconnected;
    return is_lost ? std::move(lost->why) : members_.left_before(leader);
  }
  return std::nullopt;
}

// Whether this rank is a leader with announcements to send or to take: see Relay::has_work.
bool Watch::can_relay(const Descriptor& call) const {
  if (!members_.state()->relay) return false;
  const std::lock_guard lock(engine_.messages_mutex());
  return members_.state()->relay->has_work(*members_.state(), call.sequence);
}

// In the middle of a call ranks wait for each other in chains, and the first timeout names the next rank only. So a
// rank whose call it ends adds for whom it waited, by name, because other ranks may read that, too.
Failure Watch::present(Failure failure, std::vector<int> awaited) const {
  // Once this rank aborts, the others leave because of that.
  if (failure.is<Lost, Failed>() && engine_.aborting()) {
    Failure aborted = Aborted{};
    aborted.wrote = failure.wrote;
    return aborted;
  }
  if (auto* lost = failure.as<Lost>(); lost != nullptr && lost->peer >= 0)
    engine_.identify(*lost, group_.world_rank(lost->peer));
  auto* failed = failure.as<Failed>();
  if (failed == nullptr || failed->cause != FailureKind::kTimeout) return failure;
  std::erase_if(awaited, [&](int member) {
    return member == failed->peer || member == group_.rank() ||
           std::ranges::find(failed->missing, member) != failed->missing.end();
  });
  if (awaited.empty()) return failure;
  failed->reason += "; " + rank_name(group_.rank(), &members_.global_ranks()) + " waited for " +
                    name_ranks(awaited, &members_.global_ranks());
  failed->missing.insert(failed->missing.end(), awaited.begin(), awaited.end());
  return failure;
}

// The end of a connection says little: why the member left, or which rank was lost before, says more.
Failure Watch::cause_of(Failure failure) const {
  if (!failure.is<Lost, Failed>() || engine_.aborting() || !members_.spans_hosts()) return present(std::move(failure));
  std::optional<Failure> best;
  for (int member = 0; member < group_.size(); ++member) {
    if (member == group_.rank()) continue;
    if (std::optional<MemberEnd> end = members_.process_end(member); end && end->how == MemberEnd::How::kRaised) {
      best = std::move(end->why);
      break;
    }
    std::optional<Failure> theirs = members_.posted(member);
    if (theirs && (!best || (!best->is<Lost>() && theirs->is<Lost>()))) best = std::move(theirs);
  }
  if (!best) return present(std::move(failure));
  const auto* known = failure.as<Failed>();
  const auto* stated = best->as<Failed>();
  const bool is_same_timeout = known != nullptr && stated != nullptr && known->peer == stated->peer &&
                               known->cause == FailureKind::kTimeout && stated->cause == FailureKind::kTimeout;
  if (is_same_timeout) return present(std::move(failure));  // which may name for whom this rank waited
  best->wrote = failure.wrote;
  return present(*std::move(best));
}

// The world ranks of the first missing ranks, and of those that relay for them, whose calls the error describes.
std::vector<int> Watch::explained_peers(const Timeout& timeout, bool has_world_ranks) const {
  std::vector<int> peers;
  for (const int missing : timeout.missing) {
    if (peers.size() == Engine::kExplainedRanks) break;
    peers.push_back(has_world_ranks ? missing : group_.world_rank(missing));
  }
  for (const int relay : timeout.relays) peers.push_back(group_.world_rank(relay));
  return peers;
}

std::vector<int> Watch::stopped_members() const {
  std::vector<int> stopped;
  for (int member = 0; member < group_.size(); ++member)
    if (members_.is_local(member) && member != group_.rank() && engine_.is_stopped(group_.world_rank(member)))
      stopped.push_back(member);
  return stopped;
}

// At the deadline of a replay: the ranks whose GPUs do not run one of the same call. A rank follows a replay, and makes
// that known, after it has run for 0.1 s, and the deadline is later by the same time. So these ranks have not begun it
// before the time limit has passed, or have ended it.
void Watch::look_at_replays(Timeout& timeout, const Descriptor& call) {
  std::vector<int> peers;
  for (const int member : group_.world_ranks())
    if (member != engine_.rank()) peers.push_back(member);
  const std::vector<std::optional<bool>> replays = engine_.replays_of(peers, call);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (replays[peer] == false) timeout.missing.push_back(members_.group_rank(peers[peer]));
  timeout.reason = "a replay of this call in a CUDA graph, ";
  if (!timeout.missing.empty())
    timeout.reason += "which does not run on " + name_ranks(timeout.missing, &members_.global_ranks());
  else if (std::ranges::count(replays, true) == std::ssize(replays))
    timeout.reason += "which runs on all ranks: a GPU or NCCL is stuck";
  else
    timeout.reason += "which may wait for any of the other ranks";
  timeout.calls = engine_.known_calls(explained_peers(timeout, false), group_.id());
}

// Before a failure is posted, which ends the calls of the ranks that receive it.
void Watch::look_at_calls(const std::vector<int>& peers) {
  engine_.query_calls(peers, group_.id());
  std::vector<std::string> calls = engine_.known_calls(peers, group_.id());
  const std::lock_guard lock(seen_mutex_);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (engine_.is_in_call(peers[peer])) seen_calls_[peers[peer]] = std::move(calls[peer]);
}

// At a deadline: describe what the first of the missing ranks are doing, or were doing before the failure was posted.
void Watch::explain(Failure& failure, bool has_world_ranks) {
  auto* timeout = failure.as<Timeout>();
  if (timeout == nullptr) return;
  const std::vector<int> peers = explained_peers(*timeout, has_world_ranks);
  timeout->calls = engine_.calls_of(peers, group_.id());
  const std::lock_guard lock(seen_mutex_);
  const std::map<int, std::string> seen = std::exchange(seen_calls_, {});
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (const auto found = seen.find(peers[peer]); found != seen.end()) timeout->calls[peer] = found->second;
}

void Watch::add_relays(Failure& failure, const Descriptor& call) {
  auto* timeout = failure.as<Timeout>();
  if (timeout == nullptr) return;
  name_relays(*timeout, call);
  if (timeout->calls.empty() && !group_.end().is_completed()) look_at_calls(explained_peers(*timeout, false));
}

// A leader that was stopped may hold back the announcement of a member of another host that has come: a timeout names
// such leaders beside the missing members.
void Watch::name_relays(Timeout& timeout, const Descriptor& call) const {
  if (!members_.spans_hosts() || is_message(call.op) || !timeout.reason.empty()) return;
  const Topology& topology = members_.state()->topology;
  for (const int member : timeout.missing) {
    if (topology.is_local(member) || members_.state()->has_announced(member, call.sequence)) continue;
    for (const int host : {topology.own_host(), topology.host_of(member)}) {
      const int leader = topology.leader_of(host);
      const bool is_named = std::ranges::find(timeout.relays, leader) != timeout.relays.end();
      if (leader != group_.rank() && !is_named && members_.state()->has_announced(leader, call.sequence))
        timeout.relays.push_back(leader);
    }
  }
  if (timeout.relays.empty()) return;
  std::ranges::sort(timeout.relays);
  timeout.reason = name_ranks(timeout.missing, &members_.global_ranks()) + ", or for " +
                   name_ranks(timeout.relays, &members_.global_ranks()) + " to relay announcements";
}

std::optional<Failure> Watch::what_ends(const GroupOperation& operation) {
  if (std::optional<Failure> failure = examine(operation, operation.call())) return failure;
  if (!operation.deadline().passed()) return std::nullopt;
  Timeout timeout{.seconds = operation.seconds(), .missing = operation.missing()};
  if (operation.is_replay()) {
    look_at_replays(timeout, operation.call());
    // The replays of a rank that has ended the group meanwhile have ended, too.
    if (std::optional<Failure> failure = examine(operation, operation.call())) return failure;
  }
  if (operation.waits_in_chain() || (timeout.missing.empty() && operation.outlives_peer())) {
    std::vector<int> stopped = stopped_members();
    if (!stopped.empty()) timeout.missing = std::move(stopped);
  }
  name_relays(timeout, operation.call());
  Failure failure(std::move(timeout));
  if (failure.as<Timeout>()->calls.empty()) explain(failure);
  return failure;
}

void Watch::report_wait(WaitReport& report, const Operation& operation, const Descriptor& call, double seconds) const {
  const std::vector<int> awaited = world_ranks(operation.missing());
  const bool has_moved = report.note_own_moves(operation.moved());
  if (has_moved) engine_.note_move(group_.id());
  const WaitReport::Due due =
      report.look(engine_.wait_report_ns(), seconds, {awaited, engine_.moves_of(awaited, group_.id()), has_moved});
  if (due == WaitReport::Due::kNothing) return;
  std::string name =
      std::string(op_name(call.op)) + " #" + std::to_string(call.sequence) + " on group " + group_.name();
  if (const std::string line = short_line(engine_.source_line(engine_.rank(), call)); !line.empty())
    name += ", at " + line;
  engine_.report_wait(due, {engine_.rank(), name, awaited, report.waited_ns()}, group_.id());
}

// The ranks that this collective waits for: those whose announcements this rank reads in shared memory and has not
// found, and those who relay what it has not found of other hosts, since a member there may have come, or even
// completed the call, before its announcement is here. While the leader of this host has not come, nothing is known of
// other hosts. A leader that can itself go on waits for nobody: the thread that advances the call may not have had a
// core since. Nor does a leader wait for one of another host that has come, while it lacks members of its own host: in
// the same way the other one waits for this leader, and both go on when those members come.
std::optional<Awaited> Watch::awaited(const Operation& operation, const Descriptor& call) const {
  if (can_relay(call)) return std::nullopt;
  Awaited awaited{.op = call.op, .number = call.sequence, .ranks = {}};
  const Topology& topology = members_.state()->topology;
  const int own_leader = topology.leader_of(topology.own_host());
  const auto has_come = [&](int member) {
    const GroupMemoryView& theirs = members_.state()->member(member);
    return theirs && theirs.announcement(call.sequence).sequence.load(std::memory_order_seq_cst) >= call.sequence;
  };
  if (!members_.spans_hosts()) {
    // Once all have come they wait for each other's data in turn: such a wait ends when the other rank gets a core.
    std::vector<int> missing = operation.missing();
    std::erase_if(missing, has_come);
    awaited.ranks = world_ranks(std::move(missing));
    return awaited;
  }
  const bool knows_all = has_come(own_leader);
  bool lacks_local = false;
  for (int member = 0; member < group_.size(); ++member)
    lacks_local = lacks_local || (topology.is_local(member) && member != group_.rank() && !has_come(member));
  for (int member = 0; member < group_.size(); ++member) {
    const bool is_local = topology.is_local(member);
    if (member == group_.rank() || has_come(member) || !(knows_all || is_local)) continue;
    const int relay = topology.is_leader() ? topology.leader_of(topology.host_of(member)) : own_leader;
    if (!is_local && lacks_local && topology.is_leader() && has_come(relay)) continue;
    const int world_rank = group_.world_rank(is_local ? member : relay);
    if (std::ranges::find(awaited.ranks, world_rank) == awaited.ranks.end()) awaited.ranks.push_back(world_rank);
  }
  if (can_relay(call)) return std::nullopt;  // a member has come since
  return awaited;
}

// A wait that a failure of another rank ends is not part of a deadlock: the program may go on after it.
std::optional<Awaited> Watch::unless_failed(const Operation& operation, const Descriptor& call,
                                            std::optional<Awaited> awaited) const {
  return awaited && !examine(operation, call) ? std::move(awaited) : std::nullopt;
}

std::optional<Failure> Watch::find_deadlock(DeadlockDetector& watch, const Operation& operation,
                                            const std::function<std::optional<Awaited>()>& awaited,
                                            LanguageRuntime& language) {
  const auto awaited_alone = [&]() -> std::optional<Awaited> {
    std::optional<Awaited> found = awaited();
    if (!found) return std::nullopt;
    const std::optional<size_t> open = engine_.progress().open_receives(operation, found->ranks);
    if (!open) return std::nullopt;
    found->open_receives = *open;
    return found;
  };
  return watch.examine(awaited_alone, [&] { return language.alone(); });
}

// Advance the operation until it has completed; return its failure. A deadlock is the cause of the other failures that
// its ranks see.
std::optional<Failure> Watch::complete(Operation& operation, const Descriptor& call,
                                       const std::function<std::optional<Awaited>()>& awaited, double seconds,
                                       LanguageRuntime& language) {
  DeadlockDetector watch(engine_, seconds, engine_.suspicious_ns());
  WaitReport report;
  const auto look = [&](const Operation& running) -> std::optional<Failure> {
    if constexpr (!kDiagnoses) return std::nullopt;
    record_awaited(call, running.missing());
    report_wait(report, running, call, seconds);
    std::optional<Failure> failure = examine(running, call);
    if (failure && failure->is<Lost>()) return failure;
    std::optional<Failure> deadlock =
        find_deadlock(watch, running, [&] { return unless_failed(running, call, awaited()); }, language);
    return deadlock ? std::move(deadlock) : std::move(failure);
  };
  const Released released(language);
  WaitBudget budget(engine_.policy().for_bytes(call.bytes()), seconds);
  wait(operation, budget, engine_, language, std::cref(look));  // by reference: no allocation
  if (operation.failure() == nullptr) return std::nullopt;
  std::optional<Failure> deadlock = watch.announced();
  if (deadlock) return deadlock;
  Failure failure = cause_of(*operation.failure());
  explain(failure);
  return failure;
}

void Watch::record_awaited(const Descriptor& call, const std::vector<int>& missing) const {
  if (!is_message(call.op)) engine_.record_awaited(call, world_ranks(missing));
}

// Examine an operation that the progress thread advances, and give it up if something has ended it.
void Watch::examine_running(GroupOperation& operation) {
  std::optional<Failure> failure = operation.is_completed() ? std::nullopt : what_ends(operation);
  if (!failure)
    operation.budget().restore();
  else if (!operation.budget().extend(operation.advance()) && !operation.is_completed())
    operation.give_up(std::move(*failure));
  // Receives may be posted long before they are needed: they count once a thread waits for them.
  if (!operation.is_completed() && (!is_message(operation.call().op) || operation.is_awaited()))
    report_wait(operation.wait_report(), operation, operation.call(), operation.deadline().remaining_seconds());
}

}  // namespace procgroup
