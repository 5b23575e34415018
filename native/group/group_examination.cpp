// What ends a wait of a group's call from outside: lost members, their failures, and what the errors say of them.
#include <algorithm>

#include "group/group.hpp"

namespace procgroup {
namespace {

constexpr const char* kLeftBefore = "it left the group before this call";

}  // namespace

bool concerns_call(const Descriptor& failed, const Descriptor& running) {
  const bool has_order = failed.sequence != 0 && !is_message(failed.op) && !is_message(running.op);
  return !has_order || failed.sequence <= running.sequence;
}

std::optional<Failure> Group::broken() const {
  if (!is_completed()) return std::nullopt;
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

std::optional<Failure> Group::lost() const {
  const std::lock_guard lock(reason_mutex_);
  return lost_;
}

bool Group::has_lost_member() const {
  return std::ranges::any_of(options_.members, [&](int peer) {
    return peer != engine_.rank() && engine_.peer_status(peer) == PeerStatus::kLost;
  });
}

std::optional<Failure> Group::examine(const Operation& operation, const Descriptor& call) const {
  if (engine_.aborted()) return Failure{.kind = Failure::Kind::kAborted};
  const std::vector<int> missing = operation.missing();
  const auto concerns = [&](int member) {
    return member != options_.rank &&
           (operation.depends_on_all() || std::ranges::find(missing, member) != missing.end());
  };
  // A lost rank is the cause of what other ranks report: look for that first.
  for (int member = 0; member < size(); ++member) {
    const int peer = options_.members[index(member)];
    if (!concerns(member)) continue;
    std::optional<Failure> failure = engine_.exit_failure(peer, true);
    if (!failure && engine_.peer_status(peer) == PeerStatus::kLost) failure = engine_.loss(peer);
    if (!failure) continue;
    failure->peer = member;
    return failure;
  }
  for (int member = 0; member < size(); ++member)
    if (operation.outlives_peer() && concerns(member))
      if (std::optional<Failure> failure = examine_connection(member)) return failure;
  const std::vector<int> present = operation.outlives_peer() ? std::vector<int>{} : missing;
  for (int member = 0; member < size(); ++member)
    if (concerns(member))
      if (std::optional<Failure> failure = examine_member(member, present, call)) {
        add_own_wait(*failure, missing);
        return failure;
      }
  if (std::optional<Failure> failure = examine_relays(missing, call)) return failure;
  return broken();
}

// If a leader has left before it relayed a missing member's announcement, that announcement never comes.
std::optional<Failure> Group::examine_relays(const std::vector<int>& missing, const Descriptor& call) const {
  if (!spans_hosts() || is_message(call.op)) return std::nullopt;
  const Topology& topology = state_->topology;
  for (const int member : missing) {
    const int leader = topology.leader_of(topology.is_leader() ? topology.host_of(member) : topology.own_host());
    if (topology.is_local(member) || leader == member || !has_left(leader, call)) continue;
    // It may have relayed before it left.
    if (state_->has_announced(member, call.sequence) || can_relay(call)) continue;
    std::optional<Failure> lost = examine_connection(member);
    return lost ? std::move(lost) : std::optional(left_before(leader));
  }
  return std::nullopt;
}

bool Group::has_left(int member, const Descriptor& call) const {
  if (engine_.peer_status(options_.members[index(member)]) == PeerStatus::kLeft) return true;
  if (!is_local(member)) return examine_handshake(member, true, call).has_value();
  return state_->member(member).memory().state.load(std::memory_order_acquire) == MemberState::kLeft;
}

// Whether this rank is a leader with announcements to send or to take: see Relay::has_work.
bool Group::can_relay(const Descriptor& call) const {
  if (!state_->relay) return false;
  const std::lock_guard lock(engine_.messages_mutex());
  return state_->relay->has_work(*state_, call.sequence);
}

std::optional<Failure> Group::examine_member(int member, const std::vector<int>& missing,
                                             const Descriptor& call) const {
  const bool awaited = std::ranges::find(missing, member) != missing.end();
  const int peer = options_.members[index(member)];
  const bool is_gone = engine_.peer_status(peer) == PeerStatus::kLeft;
  // Checked after that: the reason why a member gave up says more than that it left afterwards.
  if (std::optional<Failure> failure = posted(member); failure && (is_gone || concerns_call(failure->call, call)))
    return failure;
  if (awaited && is_gone) {
    Failure failure = engine_.loss(peer);
    failure.peer = member;
    return failure;
  }
  if (!is_local(member)) return examine_handshake(member, awaited, call);
  const MemberState state = state_->member(member).memory().state.load(std::memory_order_acquire);
  return state == MemberState::kLeft && awaited ? std::optional(left_before(member)) : std::nullopt;
}

// The loss of a member of another host while another backend moves the bytes: no transfer of the engine's fails by it.
// A member that has left in order has done its part.
std::optional<Failure> Group::examine_connection(int member) const {
  if (is_local(member)) return std::nullopt;
  const int peer = options_.members[index(member)];
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().receive_arrived();
  const GroupHandshake* theirs = engine_.handshakes().received(peer, options_.id);
  const Failure* failure = engine_.messages().peer_failure(peer);
  const bool left = engine_.messages().has_left(peer) || (theirs != nullptr && theirs->left);
  if (failure == nullptr || left) return std::nullopt;
  Failure mine = *failure;
  engine_.identify(mine, peer);
  mine.peer = member;
  return mine;
}

// The failure that a member has posted, as this rank reports it.
std::optional<Failure> Group::posted(int member) const {
  std::optional<Failure> failure;
  if (is_local(member)) {
    failure = board_->read_memory(member);
  } else {
    const std::lock_guard lock(engine_.messages_mutex());
    failure = board_->read(member);
  }
  if (!failure) return std::nullopt;
  // An exception of its program ends the calls in which it is, which is no reason of theirs.
  if (std::optional<Failure> sudden = engine_.exit_failure(options_.members[index(member)], true)) {
    sudden->peer = member;
    return sudden;
  }
  failure->relayed = true;
  return as_seen_by(options_.rank, member, *std::move(failure), &global_ranks_);
}

// A member that left the group in order does not come to this call.
Failure Group::left_before(int member) const {
  const int peer = options_.members[index(member)];
  std::optional<Failure> failure = engine_.exit_failure(peer, false);
  if (!failure) failure = Failure{.kind = Failure::Kind::kLost, .reason = kLeftBefore, .left = true};
  engine_.identify(*failure, peer);
  failure->peer = member;
  return *std::move(failure);
}

// The end of a member of another host, known by other messages than its posts. A member may complete a collective and
// leave before its leader's message with its announcement has come here.
std::optional<Failure> Group::examine_handshake(int member, bool awaited, const Descriptor& call) const {
  if (!created_) return std::nullopt;
  bool left = false;
  {
    const std::lock_guard lock(engine_.messages_mutex());
    engine_.handshakes().receive_arrived();
    const GroupHandshake* theirs = engine_.handshakes().received(options_.members[index(member)], options_.id);
    if (theirs == nullptr) return std::nullopt;
    if (theirs->ended) return as_seen_by(options_.rank, member, view().by_group_rank(*theirs->ended), &global_ranks_);
    left = theirs->left && (is_message(call.op) || call.sequence > theirs->last);
  }
  return left && awaited ? std::optional(left_before(member)) : std::nullopt;
}

// The end of a connection says little: why the member left, or which rank was lost before, says more.
Failure Group::cause_of(Failure failure) const {
  if (failure.peer >= 0) engine_.identify(failure, options_.members[index(failure.peer)]);
  const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
  if (!is_end_of_peer || !spans_hosts()) return failure;
  std::optional<Failure> best;
  for (int member = 0; member < size(); ++member) {
    if (member == options_.rank) continue;
    if (std::optional<Failure> sudden = engine_.exit_failure(options_.members[index(member)], true)) {
      sudden->peer = member;
      best = std::move(sudden);
      break;
    }
    std::optional<Failure> theirs = posted(member);
    if (!theirs) continue;
    const bool is_better = !best || (best->kind != Failure::Kind::kLost && theirs->kind == Failure::Kind::kLost);
    if (is_better) best = std::move(theirs);
  }
  if (!best) return failure;
  const bool is_same = best->kind == failure.kind && best->cause == failure.cause && best->peer == failure.peer;
  if (is_same && failure.cause == Failure::Kind::kTimeout) return failure;  // see add_own_wait
  best->wrote = failure.wrote;
  return *std::move(best);
}

// The world ranks of the first missing ranks, and of those that relay for them, whose calls the error describes.
std::vector<int> Group::explained_peers(const Failure& failure, bool has_world_ranks) const {
  std::vector<int> peers;
  for (const int missing : failure.missing) {
    if (peers.size() == Engine::kExplainedRanks) break;
    peers.push_back(has_world_ranks ? missing : options_.members[index(missing)]);
  }
  for (const int relay : failure.relays) peers.push_back(options_.members[index(relay)]);
  return peers;
}

std::vector<int> Group::stopped_members() const {
  std::vector<int> stopped;
  for (int member = 0; member < size(); ++member)
    if (is_local(member) && member != rank() && engine_.is_stopped(options_.members[index(member)]))
      stopped.push_back(member);
  return stopped;
}

// At the deadline of a replay: the ranks whose GPUs do not run one of the same call. A rank follows a replay, and makes
// that known, after it has run for 0.1 s, and the deadline is later by the same time. So these ranks have not begun it
// before the time limit has passed, or have ended it.
void Group::look_at_replays(Failure& failure, const Descriptor& call) {
  std::vector<int> peers;
  for (const int member : options_.members)
    if (member != engine_.rank()) peers.push_back(member);
  const std::vector<std::optional<bool>> replays = engine_.replays_of(peers, call);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (replays[peer] == false) failure.missing.push_back(group_rank(peers[peer]));
  failure.reason = "a replay of this call in a CUDA graph, ";
  if (!failure.missing.empty())
    failure.reason += "which does not run on " + name_ranks(failure.missing, &global_ranks_);
  else if (std::ranges::count(replays, true) == std::ssize(replays))
    failure.reason += "which runs on all ranks: a GPU or NCCL is stuck";
  else
    failure.reason += "which may wait for any of the other ranks";
  failure.calls = engine_.known_calls(explained_peers(failure, false), options_.id);
}

// Before a failure is posted, which ends the calls of the ranks that receive it.
void Group::look_at_calls(const std::vector<int>& peers) {
  engine_.query_calls(peers, options_.id);
  std::vector<std::string> calls = engine_.known_calls(peers, options_.id);
  const std::lock_guard lock(reason_mutex_);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (engine_.is_in_call(peers[peer])) seen_calls_[peers[peer]] = std::move(calls[peer]);
}

// At a deadline: describe what the first of the missing ranks are doing, or were doing before the failure was posted.
void Group::explain(Failure& failure, bool has_world_ranks) {
  if (failure.kind != Failure::Kind::kTimeout) return;
  const std::vector<int> peers = explained_peers(failure, has_world_ranks);
  failure.calls = engine_.calls_of(peers, options_.id);
  const std::lock_guard lock(reason_mutex_);
  const std::map<int, std::string> seen = std::exchange(seen_calls_, {});
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (const auto found = seen.find(peers[peer]); found != seen.end()) failure.calls[peer] = found->second;
}

std::vector<std::string> Group::source_lines(const Descriptor& call) const {
  if (is_message(call.op)) return {};
  std::vector<std::string> lines(index(size()));
  const auto find = [&] {
    for (int member = 0; member < size(); ++member) {
      std::string& line = lines[index(member)];
      if (line.empty()) line = engine_.source_line(options_.members[index(member)], call);
    }
    return std::ranges::none_of(lines, [](const std::string& line) { return line.empty(); });
  };
  spans_hosts() ? engine_.await_answers(find) : static_cast<void>(find());
  return lines;
}

// Once this rank aborts, the others leave because of that.
Failure Group::own_view(Failure failure) const {
  const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
  if (!is_end_of_peer || !engine_.aborting()) return failure;
  return {.kind = Failure::Kind::kAborted, .wrote = failure.wrote};
}

// In the middle of a call ranks wait for each other in chains, and the first timeout names the next rank only. So a
// rank whose call it ends adds for whom it waited, by name, because other ranks may read that, too.
void Group::add_own_wait(Failure& failure, std::vector<int> awaited) const {
  if (failure.kind != Failure::Kind::kFailed || failure.cause != Failure::Kind::kTimeout) return;
  std::erase_if(awaited, [&](int member) {
    return member == failure.peer || member == options_.rank ||
           std::ranges::find(failure.missing, member) != failure.missing.end();
  });
  if (awaited.empty()) return;
  failure.reason +=
      "; " + rank_name(options_.rank, &global_ranks_) + " waited for " + name_ranks(awaited, &global_ranks_);
  failure.missing.insert(failure.missing.end(), awaited.begin(), awaited.end());
}

}  // namespace procgroup
