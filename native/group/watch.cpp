#include "group/watch.hpp"

#include <algorithm>
#include <utility>

#include "base/diagnostics.hpp"
#include "group/group.hpp"
#include "runtime/call_report.hpp"

namespace procgroup {
namespace {

constexpr const char* kLeftBefore = "it left the group before this call";

}  // namespace

bool concerns_call(const Descriptor& failed, const Descriptor& running) {
  const bool has_order = failed.sequence != 0 && !is_message(failed.op) && !is_message(running.op);
  return !has_order || failed.sequence <= running.sequence;
}

Watch::Watch(Group& group, Members& members) : group_(group), engine_(group.engine()), members_(members) {}

std::vector<int> Watch::world_ranks(std::vector<int> members) const {
  for (int& member : members) member = group_.world_rank(member);
  return members;
}

std::optional<Failure> Watch::examine(const Operation& operation, const Descriptor& call) const {
  if (engine_.aborted()) return Failure{.kind = Failure::Kind::kAborted};
  const std::vector<int> missing = operation.missing();
  const auto concerns = [&](int member) {
    return member != group_.rank() &&
           (operation.depends_on_all() || std::ranges::find(missing, member) != missing.end());
  };
  // A lost rank is the cause of what other ranks report: look for that first.
  for (int member = 0; member < group_.size(); ++member) {
    if (!concerns(member)) continue;
    if (std::optional<Failure> sudden = exit_of(member, true)) return sudden;
    if (engine_.peer_status(group_.world_rank(member)) == PeerStatus::kLost) return loss_of(member);
  }
  for (int member = 0; member < group_.size(); ++member)
    if (operation.outlives_peer() && concerns(member))
      if (std::optional<Failure> failure = examine_connection(member)) return failure;
  const std::vector<int> present = operation.outlives_peer() ? std::vector<int>{} : missing;
  for (int member = 0; member < group_.size(); ++member)
    if (concerns(member))
      if (std::optional<Failure> failure = examine_member(member, present, call)) {
        add_own_wait(*failure, missing);
        return failure;
      }
  if (std::optional<Failure> failure = examine_relays(missing, call)) return failure;
  return group_.end().broken();
}

// If a leader has left before it relayed a missing member's announcement, that announcement never comes.
std::optional<Failure> Watch::examine_relays(const std::vector<int>& missing, const Descriptor& call) const {
  if (!members_.spans_hosts() || is_message(call.op)) return std::nullopt;
  const Topology& topology = members_.state()->topology;
  for (const int member : missing) {
    const int leader = topology.leader_of(topology.is_leader() ? topology.host_of(member) : topology.own_host());
    if (topology.is_local(member) || leader == member || !has_left(leader, call)) continue;
    // It may have relayed before it left.
    if (members_.state()->has_announced(member, call.sequence) || can_relay(call)) continue;
    std::optional<Failure> lost = examine_connection(member);
    return lost ? std::move(lost) : std::optional(left_before(leader));
  }
  return std::nullopt;
}

bool Watch::has_left(int member, const Descriptor& call) const {
  if (engine_.peer_status(group_.world_rank(member)) == PeerStatus::kLeft) return true;
  if (!members_.is_local(member)) return examine_handshake(member, true, call).has_value();
  return members_.state()->member(member).memory().state.load(std::memory_order_acquire) == MemberState::kLeft;
}

// Whether this rank is a leader with announcements to send or to take: see Relay::has_work.
bool Watch::can_relay(const Descriptor& call) const {
  if (!members_.state()->relay) return false;
  const std::lock_guard lock(engine_.messages_mutex());
  return members_.state()->relay->has_work(*members_.state(), call.sequence);
}

std::optional<Failure> Watch::examine_member(int member, const std::vector<int>& missing,
                                             const Descriptor& call) const {
  const bool awaited = std::ranges::find(missing, member) != missing.end();
  const bool is_gone = engine_.peer_status(group_.world_rank(member)) == PeerStatus::kLeft;
  // Checked after that: the reason why a member gave up says more than that it left afterwards.
  if (std::optional<Failure> failure = posted(member); failure && (is_gone || concerns_call(failure->call, call)))
    return failure;
  if (awaited && is_gone) return loss_of(member);
  if (!members_.is_local(member)) return examine_handshake(member, awaited, call);
  const MemberState state = members_.state()->member(member).memory().state.load(std::memory_order_acquire);
  return state == MemberState::kLeft && awaited ? std::optional(left_before(member)) : std::nullopt;
}

// The loss of a member of another host while another backend moves the bytes: no transfer of the engine's fails by it.
// A member that has left in order has done its part.
std::optional<Failure> Watch::examine_connection(int member) const {
  if (members_.is_local(member)) return std::nullopt;
  const int peer = group_.world_rank(member);
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().receive_arrived();
  const GroupHandshake* theirs = engine_.handshakes().received(peer, group_.id());
  const Failure* failure = engine_.messages().peer_failure(peer);
  const bool left = engine_.messages().has_left(peer) || (theirs != nullptr && theirs->left);
  if (failure == nullptr || left) return std::nullopt;
  Failure mine = *failure;
  engine_.identify(mine, peer);
  mine.peer = member;
  return mine;
}

// The failure that a member has posted, as this rank reports it.
std::optional<Failure> Watch::posted(int member) const {
  std::optional<Failure> failure = members_.posted(member);
  if (!failure) return std::nullopt;
  // An exception of its program ends the calls in which it is, which is no reason of theirs.
  if (std::optional<Failure> sudden = exit_of(member, true)) return sudden;
  failure->relayed = true;
  return as_seen_by(group_.rank(), member, *std::move(failure), &members_.global_ranks());
}

// A member that left the group in order does not come to this call.
Failure Watch::left_before(int member) const {
  if (std::optional<Failure> failure = exit_of(member, false)) return *std::move(failure);
  Failure failure{.kind = Failure::Kind::kLost, .peer = member, .reason = kLeftBefore, .left = true};
  engine_.identify(failure, group_.world_rank(member));
  return failure;
}

std::optional<Failure> Watch::exit_of(int member, bool sudden) const {
  std::optional<Failure> failure = engine_.exit_failure(group_.world_rank(member), sudden);
  if (failure) failure->peer = member;
  return failure;
}

Failure Watch::loss_of(int member) const {
  Failure failure = engine_.loss(group_.world_rank(member));
  failure.peer = member;
  return failure;
}

// The end of a member of another host, known by other messages than its posts. A member may complete a collective and
// leave before its leader's message with its announcement has come here.
std::optional<Failure> Watch::examine_handshake(int member, bool awaited, const Descriptor& call) const {
  if (!members_.is_created()) return std::nullopt;
  bool left = false;
  {
    const std::lock_guard lock(engine_.messages_mutex());
    engine_.handshakes().receive_arrived();
    const GroupHandshake* theirs = engine_.handshakes().received(group_.world_rank(member), group_.id());
    if (theirs == nullptr) return std::nullopt;
    if (theirs->ended)
      return as_seen_by(group_.rank(), member, members_.view().by_group_rank(*theirs->ended), &members_.global_ranks());
    left = theirs->left && (is_message(call.op) || call.sequence > theirs->last);
  }
  return left && awaited ? std::optional(left_before(member)) : std::nullopt;
}

// Once this rank aborts, the others leave because of that.
Failure Watch::own_view(Failure failure) const {
  const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
  if (!is_end_of_peer || !engine_.aborting()) return failure;
  return {.kind = Failure::Kind::kAborted, .wrote = failure.wrote};
}

// The end of a connection says little: why the member left, or which rank was lost before, says more.
Failure Watch::present(Failure failure) const {
  if (failure.peer >= 0) engine_.identify(failure, group_.world_rank(failure.peer));
  const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
  if (!is_end_of_peer || engine_.aborting() || !members_.spans_hosts()) return own_view(std::move(failure));
  std::optional<Failure> best;
  for (int member = 0; member < group_.size(); ++member) {
    if (member == group_.rank()) continue;
    if (std::optional<Failure> sudden = exit_of(member, true)) {
      best = std::move(sudden);
      break;
    }
    std::optional<Failure> theirs = posted(member);
    if (!theirs) continue;
    const bool is_better = !best || (best->kind != Failure::Kind::kLost && theirs->kind == Failure::Kind::kLost);
    if (is_better) best = std::move(theirs);
  }
  if (!best) return own_view(std::move(failure));
  const bool is_same = best->kind == failure.kind && best->cause == failure.cause && best->peer == failure.peer;
  if (is_same && failure.cause == Failure::Kind::kTimeout) return own_view(std::move(failure));  // see add_own_wait
  best->wrote = failure.wrote;
  return own_view(*std::move(best));
}

// In the middle of a call ranks wait for each other in chains, and the first timeout names the next rank only. So a
// rank whose call it ends adds for whom it waited, by name, because other ranks may read that, too.
void Watch::add_own_wait(Failure& failure, std::vector<int> awaited) const {
  if (failure.kind != Failure::Kind::kFailed || failure.cause != Failure::Kind::kTimeout) return;
  std::erase_if(awaited, [&](int member) {
    return member == failure.peer || member == group_.rank() ||
           std::ranges::find(failure.missing, member) != failure.missing.end();
  });
  if (awaited.empty()) return;
  failure.reason += "; " + rank_name(group_.rank(), &members_.global_ranks()) + " waited for " +
                    name_ranks(awaited, &members_.global_ranks());
  failure.missing.insert(failure.missing.end(), awaited.begin(), awaited.end());
}

// The world ranks of the first missing ranks, and of those that relay for them, whose calls the error describes.
std::vector<int> Watch::explained_peers(const Failure& failure, bool has_world_ranks) const {
  std::vector<int> peers;
  for (const int missing : failure.missing) {
    if (peers.size() == Engine::kExplainedRanks) break;
    peers.push_back(has_world_ranks ? missing : group_.world_rank(missing));
  }
  for (const int relay : failure.relays) peers.push_back(group_.world_rank(relay));
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
void Watch::look_at_replays(Failure& failure, const Descriptor& call) {
  std::vector<int> peers;
  for (const int member : group_.world_ranks())
    if (member != engine_.rank()) peers.push_back(member);
  const std::vector<std::optional<bool>> replays = engine_.replays_of(peers, call);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (replays[peer] == false) failure.missing.push_back(members_.group_rank(peers[peer]));
  failure.reason = "a replay of this call in a CUDA graph, ";
  if (!failure.missing.empty())
    failure.reason += "which does not run on " + name_ranks(failure.missing, &members_.global_ranks());
  else if (std::ranges::count(replays, true) == std::ssize(replays))
    failure.reason += "which runs on all ranks: a GPU or NCCL is stuck";
  else
    failure.reason += "which may wait for any of the other ranks";
  failure.calls = engine_.known_calls(explained_peers(failure, false), group_.id());
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
  if (failure.kind != Failure::Kind::kTimeout) return;
  const std::vector<int> peers = explained_peers(failure, has_world_ranks);
  failure.calls = engine_.calls_of(peers, group_.id());
  const std::lock_guard lock(seen_mutex_);
  const std::map<int, std::string> seen = std::exchange(seen_calls_, {});
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (const auto found = seen.find(peers[peer]); found != seen.end()) failure.calls[peer] = found->second;
}

void Watch::add_relays(Failure& failure, const Descriptor& call) {
  name_relays(failure, call);
  const bool is_explained = failure.kind != Failure::Kind::kTimeout || !failure.calls.empty();
  if (!is_explained && !group_.end().is_completed()) look_at_calls(explained_peers(failure, false));
}

// A leader that was stopped may hold back the announcement of a member of another host that has come: a timeout names
// such leaders beside the missing members.
void Watch::name_relays(Failure& failure, const Descriptor& call) const {
  const bool may_be_relayed = failure.kind == Failure::Kind::kTimeout && members_.spans_hosts() && !is_message(call.op);
  if (!may_be_relayed || !failure.reason.empty()) return;
  const Topology& topology = members_.state()->topology;
  for (const int member : failure.missing) {
    if (topology.is_local(member) || members_.state()->has_announced(member, call.sequence)) continue;
    for (const int host : {topology.own_host(), topology.host_of(member)}) {
      const int leader = topology.leader_of(host);
      const bool is_named = std::ranges::find(failure.relays, leader) != failure.relays.end();
      if (leader != group_.rank() && !is_named && members_.state()->has_announced(leader, call.sequence))
        failure.relays.push_back(leader);
    }
  }
  if (failure.relays.empty()) return;
  std::ranges::sort(failure.relays);
  failure.reason = name_ranks(failure.missing, &members_.global_ranks()) + ", or for " +
                   name_ranks(failure.relays, &members_.global_ranks()) + " to relay announcements";
}

std::optional<Failure> Watch::what_ends(const GroupOperation& operation) {
  if (std::optional<Failure> failure = examine(operation, operation.call())) return failure;
  if (!operation.deadline().passed()) return std::nullopt;
  Failure timeout{.kind = Failure::Kind::kTimeout, .seconds = operation.seconds(), .missing = operation.missing()};
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
  if (timeout.calls.empty()) explain(timeout);
  return timeout;
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

// A wait that a failure of another rank ends is no part of a deadlock: the program may go on after it.
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
    if (failure && failure->kind == Failure::Kind::kLost) return failure;
    std::optional<Failure> deadlock =
        find_deadlock(watch, running, [&] { return unless_failed(running, call, awaited()); }, language);
    return deadlock ? std::move(deadlock) : std::move(failure);
  };
  const Released released(language);
  const WaitPolicy policy = engine_.policy().for_bytes(call.bytes());
  procgroup::complete(operation, seconds, policy, engine_, language, std::cref(look));  // by reference: no allocation
  if (operation.failure() == nullptr) return std::nullopt;
  std::optional<Failure> deadlock = watch.announced();
  if (deadlock) return deadlock;
  Failure failure = present(*operation.failure());
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
