// How a group begins and ends on this rank, and what each wait of its calls looks at.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine/group.hpp"
#include "engine/group_introduction.hpp"
#include "engine/group_operation.hpp"
#include "engine/sheet.hpp"

namespace procgroup {
namespace {

// Above two ranks, all_reduce of up to this many bytes lets every rank reduce everything.
constexpr size_t kDirectBytes = 64 * 1024;

constexpr const char* kLeftBefore = "it left the group before this call";

size_t index(int rank) { return static_cast<size_t>(rank); }

// Let the members see in this rank's group memory that it gave up, and why.
void state_failure(GroupMemory& memory, const Failure& failure, const std::vector<int>* global_ranks = nullptr) {
  const bool lost = failure.kind == Failure::Kind::kLost;
  const bool has_cause = lost || failure.kind == Failure::Kind::kFailed;
  memory.cause = has_cause ? failure.peer : -1;
  memory.was_lost = lost;
  memory.lost_pid = failure.pid;
  const std::string reason = has_cause ? failure.reason : failure.summary(global_ranks);
  std::strncpy(memory.reason, reason.c_str(), kReasonBytes - 1);
  memory.state.store(MemberState::kFailed, std::memory_order_seq_cst);
}

}  // namespace

Group::Group(Engine& engine, GroupOptions options) : engine_(engine), options_(std::move(options)) {
  for (const int member : options_.members) global_ranks_.push_back(engine_.global_rank(member));
  for (int member = 0; member <= size(); ++member) {
    if (member == size())
      global_ranks_.clear();
    else if (global_ranks_[index(member)] != member)
      break;
  }
  // An all_to_all shows the sizes of all its pieces in a small area.
  options_.layout.small_bytes = std::max(options_.layout.small_bytes, 2 * Sheet::bytes(size()));
  if (options_.shared) {
    offset_ = engine_.heap().take(GroupLayout::memory_bytes(options_.members.size()));
  } else {
    mesh_.emplace(engine_.messages(), GroupView{options_.id, options_.rank, options_.members, global_ranks_});
  }
  engine_.add_name(options_.id, {options_.name, global_ranks_});
  engine_.progress().add(this);
}

Group::~Group() {
  if (engine_.forked()) return;
  leave();
  engine_.remove_name(options_.id);
  if (options_.shared) retire();
  const std::lock_guard lock(engine_.messages_mutex());
  mesh_.reset();
}

// Say to every member that this rank reads no more, and give back what it let them read, once they say so too.
void Group::retire() {
  GroupHeap& heap = engine_.heap();
  GroupHeap::Retired retired{.memory = offset_,
                             .memory_bytes = GroupLayout::memory_bytes(options_.members.size()),
                             .blocks = {},
                             .is_unread = [] { return true; }};
  if (shared_) {
    for (int member = 0; member < size(); ++member)
      if (member != rank()) shared_->members[index(member)].departed(rank()).store(1, std::memory_order_release);
    if (const uint64_t small = shared_->staging->surrender_small(); small != 0)
      retired.blocks.emplace_back(&heap.small_pool(options_.layout), small);
    if (const uint64_t slots = shared_->staging->surrender_slots(); slots != 0)
      retired.blocks.emplace_back(&heap.slots_pool(options_.layout), slots);
  }
  // A member that had heard everybody has gone on, also where this rank has not: it looks into this memory, and writes
  // there that it leaves.
  if (shared_ || introduces_) {
    const GroupMemoryView own(engine_.arena(), offset_, options_.members.size(), options_.layout);
    retired.is_unread = [&engine = engine_, options = options_, mine = own] {
      for (int member = 0; member < static_cast<int>(options.members.size()); ++member) {
        if (member == options.rank || mine.departed(member).load(std::memory_order_acquire) != 0) continue;
        if (engine.peer_status(options.members[index(member)]) == PeerStatus::kPresent) return false;
      }
      return true;
    };
  }
  heap.retire(std::move(retired));
}

void Group::attach(const std::vector<uint64_t>& offsets) {
  std::vector<GroupMemoryView> views;
  for (size_t member = 0; member < options_.members.size(); ++member) {
    const Arena* arena = engine_.peer_arena(options_.members[member]);
    arenas_.push_back(arena);
    views.emplace_back(*arena, offsets.at(member), options_.members.size(), options_.layout);
  }
  GroupHeap& heap = engine_.heap();
  auto staging = std::make_unique<Staging>(heap.small_pool(options_.layout), heap.slots_pool(options_.layout), views,
                                           options_.rank);
  std::vector<const void*> sources(views.size());
  shared_.emplace(SharedState{.rank = options_.rank,
                              .layout = options_.layout,
                              .members = std::move(views),
                              .arenas = &arenas_,
                              .staging = std::move(staging),
                              .progress = 0,
                              .chunks = 0,
                              .plan = {},
                              .pieces = {},
                              .sources = std::move(sources),
                              .direct_bytes = kDirectBytes,
                              .exchanged_bytes = options_.exchanged_bytes,
                              .reading = options_.reading,
                              .global_ranks = &global_ranks_});
  shared_->reads_everything = true;
  for (int member = 0; member < size(); ++member) {
    const PeerMemory* peer = member == rank() ? nullptr : engine_.peer_memory(options_.members[index(member)]);
    shared_->peers.push_back(peer);
    if (peer != nullptr && !peer->reads_everything()) shared_->reads_everything = false;
  }
}

void Group::introduce(const std::string& call, double seconds, Host& host) {
  introduces_ = true;
  GroupIntroduction operation(engine_, options_.id, options_.members, offset_, call);
  WaitReport report;
  drive(operation, seconds, engine_.policy(), engine_, host, [&](const Operation&) {
    const WaitReport::Due due = report.look(engine_.wait_report_ns());
    if (due != WaitReport::Due::kNothing)
      engine_.report_wait(due, {engine_.rank(), call, operation.missing(), report.waited_ns()}, options_.id);
    return operation.examine();
  });
  refused_ = operation.refused();
  if (operation.failure() != nullptr) {
    Failure failure = *operation.failure();
    host.unlock();
    explain(failure, true);
    host.lock();
    refuse_to_begin(failure);
  }
  introduced_ = true;
  if (!options_.shared) return;
  if (const std::optional<Failure> failure = misplaced(operation.offsets())) refuse_to_begin(*failure);
  attach(operation.offsets());
}

void Group::refuse_to_begin(const Failure& failure) {
  if (options_.shared) {
    // Members that had heard everybody in time have gone on, and look here.
    const GroupMemoryView mine(engine_.arena(), offset_, options_.members.size(), options_.layout);
    state_failure(mine.memory(), Failure{.kind = Failure::Kind::kBroken, .reason = failure.summary()});
  }
  throw OperationFailed{failure, {}};
}

// The member whose group memory cannot lie where it says.
std::optional<Failure> Group::misplaced(const std::vector<uint64_t>& offsets) const {
  for (size_t member = 0; member < offsets.size(); ++member) {
    const int world = options_.members[member];
    try {
      GroupMemoryView(*engine_.peer_arena(world), offsets[member], options_.members.size(), options_.layout);
    } catch (const std::out_of_range& error) {
      return Failure{.kind = Failure::Kind::kFailed, .peer = world, .reason = error.what()};
    }
  }
  return std::nullopt;
}

std::optional<Failure> Group::broken() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

std::optional<Failure> Group::examine(const Operation& operation) const {
  if (engine_.aborted()) return Failure{.kind = Failure::Kind::kAborted};
  const std::vector<int> missing = operation.missing();
  const auto concerns = [&](int member) {
    return member != options_.rank &&
           (operation.depends_on_all() || std::ranges::find(missing, member) != missing.end());
  };
  // A lost rank is the cause of what other ranks report: look for that first.
  for (int member = 0; member < size(); ++member) {
    const int peer = options_.members[static_cast<size_t>(member)];
    if (!concerns(member)) continue;
    std::optional<Failure> failure = engine_.exit_failure(peer, true);
    if (!failure && engine_.peer_status(peer) == PeerStatus::kLost) failure = engine_.loss(peer);
    if (!failure) continue;
    failure->peer = member;
    return failure;
  }
  for (int member = 0; member < size(); ++member)
    if (concerns(member))
      if (std::optional<Failure> failure = examine_member(member, missing)) return failure;
  return broken();
}

std::optional<Failure> Group::examine_member(int member, const std::vector<int>& missing) const {
  const bool awaited = std::find(missing.begin(), missing.end(), member) != missing.end();
  const int peer = options_.members[static_cast<size_t>(member)];
  const bool is_gone = engine_.peer_status(peer) == PeerStatus::kLeft;
  // Asked after that: why a member gave up says more than that it left afterwards.
  const MemberState state =
      shared_ ? shared_->member(member).memory().state.load(std::memory_order_acquire) : MemberState::kPresent;
  if (state == MemberState::kFailed) return stated_failure(member);
  if (awaited && is_gone) {
    Failure failure = engine_.loss(peer);
    failure.peer = member;
    return failure;
  }
  if (!shared_) return examine_introduction(member, awaited);
  if (state != MemberState::kLeft || !awaited) return std::nullopt;
  if (std::optional<Failure> failure = engine_.exit_failure(peer, false)) {
    failure->peer = member;
    return failure;
  }
  return Failure{.kind = Failure::Kind::kLost,
                 .peer = member,
                 .pid = engine_.peer_arena(peer)->header().pid,
                 .reason = kLeftBefore};
}

// What a member that gave up says about it. What made it give up is passed on, so that all name the same cause.
Failure Group::stated_failure(int member) const {
  const GroupMemory& memory = shared_->member(member).memory();
  // An exception of its program ends the calls in which it is, which is no reason of theirs.
  if (std::optional<Failure> sudden = engine_.exit_failure(options_.members[index(member)], true)) {
    sudden->peer = member;
    return *std::move(sudden);
  }
  Failure failure{.kind = Failure::Kind::kFailed, .peer = member, .reason = readable(memory.reason, kReasonBytes)};
  const int32_t cause = memory.cause;  // read once: that member can write it at any time
  if (cause < 0 || cause >= size() || cause == options_.rank) return failure;
  failure.peer = cause;
  if (memory.was_lost == 0) return failure;
  failure.kind = Failure::Kind::kLost;
  failure.pid = memory.lost_pid;
  return failure;
}

// What a member without shared memory has said about its end. Its failed calls tell by themselves.
std::optional<Failure> Group::examine_introduction(int member, bool awaited) const {
  if (!introduced_) return std::nullopt;
  const int peer = options_.members[index(member)];
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.introductions().collect();
  const Introduction* theirs = engine_.introductions().heard(peer, options_.id);
  if (theirs == nullptr) return std::nullopt;
  if (theirs->ended) return Failure{.kind = Failure::Kind::kFailed, .peer = member, .reason = theirs->ended->reason};
  if (!theirs->left || !awaited) return std::nullopt;
  if (const Failure* exit = engine_.messages().exit_failure(peer, false)) {
    Failure failure = *exit;
    failure.peer = member;
    return failure;
  }
  return Failure{.kind = Failure::Kind::kLost, .peer = member, .pid = engine_.peer_pid(peer), .reason = kLeftBefore};
}

// At a deadline: what the first of the missing ranks are doing.
void Group::explain(Failure& failure, bool has_world_ranks) const {
  constexpr size_t kExplained = 8;
  if (failure.kind != Failure::Kind::kTimeout) return;
  std::vector<int> peers;
  for (const int missing : failure.missing) {
    if (peers.size() == kExplained) break;
    peers.push_back(has_world_ranks ? missing : options_.members[index(missing)]);
  }
  failure.calls = engine_.calls_of(peers, options_.id);
}

// Once this rank has aborted, the others leave because of that.
Failure Group::own_view(Failure failure) const {
  const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
  if (!is_end_of_peer || !engine_.aborted()) return failure;
  return {.kind = Failure::Kind::kAborted, .wrote = failure.wrote};
}

bool Group::break_with(const Failure& failure) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return false;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = failure.summary(&global_ranks_)};
  }
  over_.store(true, std::memory_order_release);
  if (!shared_) return true;
  state_failure(shared_->mine().memory(), failure, &global_ranks_);
  shared_->wake_peers();
  return true;
}

void Group::abort() {
  const Failure aborted{.kind = Failure::Kind::kAborted};
  break_with(aborted);
  part(&aborted);
  engine_.announce_news();
}

// Where members share no memory, they hear of the end by a message.
void Group::part(const Failure* failure) {
  if (!introduced_) return;
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.introductions().close(options_.id, shared_ ? nullptr : failure, !shared_);
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  mark_left();
  part(nullptr);
  // From here on the progress thread does not touch this group: what is pending ends now, and nobody waits for ever.
  engine_.progress().remove(this);
  examine_pending();
  engine_.completed();
}

void Group::mark_left() {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = "this rank left the group"};
  }
  over_.store(true, std::memory_order_release);
  if (!shared_) return;
  shared_->mine().memory().state.store(MemberState::kLeft, std::memory_order_seq_cst);
  shared_->wake_peers();
}

}  // namespace procgroup
