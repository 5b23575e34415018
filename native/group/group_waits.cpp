// Blocking calls of a group: messages are sent at once where that is possible, and every wait is watched for deadlocks.
#include <algorithm>

#include "base/diagnostics.hpp"
#include "base/processor.hpp"
#include "base/ticks.hpp"
#include "group/group.hpp"
#include "group/group_operation.hpp"
#include "liveness/deadlock.hpp"

namespace procgroup {

// A small message that can go, or comes while nobody pauses for long, makes no operation: see Messages::send_at_once.
std::optional<int> Group::message_at_once(const MessageRequest& request, int looks) {
  if (request.task || is_completed()) return std::nullopt;
  const uint64_t started = kDiagnoses ? now_ticks() : 0;
  MessageRequest tried{request.op, request.data, request.count, request.dtype, request.peer, request.tag};
  AtOnce became;
  {
    const std::unique_lock lock(engine_.messages_mutex(), std::try_to_lock);
    if (!lock) return std::nullopt;
    for (;;) {
      became = request.peer == kAnySource ? try_receive_from_any(tried) : try_message(tried);
      if (became != AtOnce::kNotYet || --looks <= 0) break;
      cpu_pause();
    }
  }
  if (became != AtOnce::kDone) return std::nullopt;
  if (request.after) request.after();
  engine_.recorder().record(describe(request), started, request.source);
  return tried.peer;
}

// To wait a moment for a message takes less time than to post receives: those that follow a posted one have to be
// posted, too. A program that starts its receives long before their messages come is not to wait for each: a receive
// that has to be posted takes one of the few credits, a message that came gives one.
std::optional<int> Group::start_at_once(const MessageRequest& request) {
  if (request.op != OpKind::kRecv) return message_at_once(request);
  const int credits = receive_credits_.load(std::memory_order_relaxed);
  const bool waits = credits > 0 && engine_.policy().held_polls() > 0;
  const std::optional<int> came = message_at_once(request, waits ? kReceivePolls : 1);
  const int left = came ? std::min(credits + 1, kReceiveCredits) : std::max(credits - 1, 0);
  if (left != credits) receive_credits_.store(left, std::memory_order_relaxed);
  return came;
}

AtOnce Group::try_message(const MessageRequest& request) {
  Messages& messages = engine_.messages();
  const int peer = options_.members[static_cast<size_t>(request.peer)];
  const MessageKey key{options_.id, request.tag};
  const size_t bytes = request.count * dtype_size(request.dtype);
  const ElementType type = element_type(request.dtype);
  if (request.op == OpKind::kRecv) return messages.receive_at_once(peer, key, request.data, bytes, type);
  return messages.send_at_once(peer, key, request.data, bytes, type) ? AtOnce::kDone : AtOnce::kNot;
}

// The member behind the one that was found last is looked at first: one that sends much does not keep others waiting.
AtOnce Group::try_receive_from_any(MessageRequest& request) {
  for (int number = 0; number < size(); ++number) {
    request.peer = (looked_first_at_ + number) % size();
    if (request.peer == rank()) continue;
    const AtOnce became = try_message(request);
    if (became == AtOnce::kDone) looked_first_at_ = request.peer + 1;
    if (became != AtOnce::kNotYet) return became;
  }
  return AtOnce::kNotYet;
}

// Of a receive that fails: the messages of that sender that have come with other tags. With the mutex of messages.
std::string Group::unread(const MessageRequest& request) const {
  if (request.op != OpKind::kRecv || request.external || request.peer == kAnySource) return "";
  const auto name = [](uint64_t tag) {
    return tag < kFirstOwnTag ? "tag " + std::to_string(tag) : std::string("an object or a message of procgroup's own");
  };
  std::vector<uint64_t> tags = engine_.messages().unread_tags(options_.members[index(request.peer)], options_.id);
  std::erase_if(tags, [&](uint64_t tag) { return tag == request.tag || tag >> 63 != 0; });
  if (tags.empty()) return "";
  const bool is_own = tags.front() >= kFirstOwnTag;
  return "a message from " + rank_name(request.peer, &global_ranks_) + " is unread: " + (is_own ? "" : "it has ") +
         name(tags.front()) + ", and this call awaits " + name(request.tag);
}

int Group::run_message(const MessageRequest& request, double seconds, LanguageRuntime& language) {
  const WaitPolicy& policy = engine_.policy();
  const int looks = policy.oversubscribed || !policy.hold_lock ? 1 : kHeldPolls;
  if (const std::optional<int> peer = message_at_once(request, looks)) return request.op == OpKind::kRecv ? *peer : -1;
  MessageOperation operation(*this, request, seconds);
  require_usable(operation.call());
  auto failure = complete_watched(operation, operation.call(), [&] { return operation.awaited(); }, seconds, language);
  if (!failure) return operation.source();
  {
    const std::lock_guard lock(engine_.messages_mutex());
    failure->note = unread(request);
  }
  throw reported(*std::move(failure), operation.call());
}

// Advance the operation until it has completed; return its failure. A deadlock is the cause of the other failures that
// its ranks see.
std::optional<Failure> Group::complete_watched(Operation& operation, const Descriptor& call,
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
  complete(operation, seconds, policy, engine_, language, std::cref(look));  // by reference: no allocation
  if (operation.failure() == nullptr) return std::nullopt;
  std::optional<Failure> deadlock = watch.announced();
  if (deadlock) return deadlock;
  Failure failure = own_view(cause_of(*operation.failure()));
  explain(failure);
  return failure;
}

// A wait that a failure of another rank ends is no part of a deadlock: the program may go on after it.
std::optional<Awaited> Group::unless_failed(const Operation& operation, const Descriptor& call,
                                            std::optional<Awaited> awaited) const {
  return awaited && !examine(operation, call) ? std::move(awaited) : std::nullopt;
}

std::optional<Failure> Group::find_deadlock(DeadlockDetector& watch, const Operation& operation,
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

std::vector<int> Group::world_ranks(std::vector<int> members) const {
  for (int& member : members) member = options_.members[static_cast<size_t>(member)];
  return members;
}

void Group::record_awaited(const Descriptor& call, const std::vector<int>& missing) const {
  if (!is_message(call.op)) engine_.record_awaited(call, world_ranks(missing));
}

void Group::report_wait(WaitReport& report, const Operation& operation, const Descriptor& call, double seconds) const {
  const std::vector<int> awaited = world_ranks(operation.missing());
  const bool has_moved = report.note_own_moves(operation.moved());
  if (has_moved) engine_.note_move(options_.id);
  const WaitReport::Due due =
      report.look(engine_.wait_report_ns(), seconds, {awaited, engine_.moves_of(awaited, options_.id), has_moved});
  if (due == WaitReport::Due::kNothing) return;
  std::string name =
      std::string(op_name(call.op)) + " #" + std::to_string(call.sequence) + " on group " + options_.name;
  if (const std::string line = short_line(source_line(call)); !line.empty()) name += ", at " + line;
  engine_.report_wait(due, {engine_.rank(), name, awaited, report.waited_ns()}, options_.id);
}

// The ranks that this collective waits for: those whose announcements this rank reads in shared memory and has not
// found, and those who relay what it has not found of other hosts, since a member there may have come, or even
// completed the call, before its announcement is here. While the leader of this host has not come, nothing is known of
// other hosts. A leader that can itself go on waits for nobody: the thread that advances the call may not have had a
// core since. Nor does a leader wait for one of another host that has come, while it lacks members of its own host: in
// the same way the other one waits for this leader, and both go on when those members come.
std::optional<Awaited> Group::awaited(const Operation& operation, const Descriptor& call) const {
  if (can_relay(call)) return std::nullopt;
  Awaited awaited{.op = call.op, .number = call.sequence, .ranks = {}};
  const Topology& topology = state_->topology;
  const int own_leader = topology.leader_of(topology.own_host());
  const auto has_come = [&](int member) {
    const GroupMemoryView& theirs = state_->member(member);
    return theirs && theirs.announcement(call.sequence).sequence.load(std::memory_order_seq_cst) >= call.sequence;
  };
  if (!spans_hosts()) {
    // Once all have come they wait for each other's data in turn: such a wait ends when the other rank gets a core.
    std::vector<int> missing = operation.missing();
    std::erase_if(missing, has_come);
    awaited.ranks = world_ranks(std::move(missing));
    return awaited;
  }
  const bool knows_all = has_come(own_leader);
  bool lacks_local = false;
  for (int member = 0; member < size(); ++member)
    lacks_local = lacks_local || (topology.is_local(member) && member != rank() && !has_come(member));
  for (int member = 0; member < size(); ++member) {
    const bool is_local = topology.is_local(member);
    if (member == rank() || has_come(member) || !(knows_all || is_local)) continue;
    const int relay = topology.is_leader() ? topology.leader_of(topology.host_of(member)) : own_leader;
    if (!is_local && lacks_local && topology.is_leader() && has_come(relay)) continue;
    const int world_rank = options_.members[static_cast<size_t>(is_local ? member : relay)];
    if (std::ranges::find(awaited.ranks, world_rank) == awaited.ranks.end()) awaited.ranks.push_back(world_rank);
  }
  if (can_relay(call)) return std::nullopt;  // a member has come since
  return awaited;
}

// A leader that was stopped may hold back the announcement of a member of another host that has come: a timeout names
// such leaders beside the missing members.
void Group::name_relays(Failure& failure, const Descriptor& call) const {
  const bool may_be_relayed = failure.kind == Failure::Kind::kTimeout && spans_hosts() && !is_message(call.op);
  if (!may_be_relayed || !failure.reason.empty()) return;
  const Topology& topology = state_->topology;
  for (const int member : failure.missing) {
    if (topology.is_local(member) || state_->has_announced(member, call.sequence)) continue;
    for (const int host : {topology.own_host(), topology.host_of(member)}) {
      const int leader = topology.leader_of(host);
      const bool is_named = std::ranges::find(failure.relays, leader) != failure.relays.end();
      if (leader != rank() && !is_named && state_->has_announced(leader, call.sequence))
        failure.relays.push_back(leader);
    }
  }
  if (failure.relays.empty()) return;
  std::ranges::sort(failure.relays);
  failure.reason = name_ranks(failure.missing, &global_ranks_) + ", or for " +
                   name_ranks(failure.relays, &global_ranks_) + " to relay announcements";
}

}  // namespace procgroup
