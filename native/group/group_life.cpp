// The begin and the end of a group on this rank, and the checks of each wait of its calls.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "collectives/buffer_table.hpp"
#include "group/group.hpp"
#include "group/group_creation.hpp"
#include "group/group_operation.hpp"

namespace procgroup {
namespace {

// Above two ranks, all_reduce of up to this many bytes lets every rank reduce everything.
constexpr size_t kDirectBytes = 64 * 1024;

constexpr const char* kLeftBefore = "it left the group before this call";

size_t index(int rank) { return static_cast<size_t>(rank); }

// The number of missing ranks whose calls an error describes.
constexpr size_t kExplained = 8;

// Whether a failure in the call `failed` is one of the running call, too: it ends the group, and with it all later
// calls. An earlier call was made well by the member that posted the failure, and may still complete.
bool concerns_call(const Descriptor& failed, const Descriptor& running) {
  const bool has_order = failed.sequence != 0 && !is_message(failed.op) && !is_message(running.op);
  return !has_order || failed.sequence <= running.sequence;
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
  // An all_to_all shows the sizes of all its blocks in a small area.
  options_.layout.small_bytes = std::max(options_.layout.small_bytes, 2 * BufferTable::bytes(size()));
  offset_ = engine_.heap().take(GroupLayout::memory_bytes(options_.members.size()));
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_ = std::make_unique<FailureBoard>(engine_.messages(), view(), [this] { engine_.announce_news(); });
  }
  board_->share({engine_.arena(), offset_, options_.members.size(), options_.layout}, engine_.heap());
  engine_.add_name(options_.id, {options_.name, global_ranks_});
  engine_.progress().add(this);
}

Group::~Group() {
  if (engine_.forked()) return;
  leave();
  engine_.remove_name(options_.id);
  retire();
  const std::lock_guard lock(engine_.messages_mutex());
  board_.reset();
}

// Publish to every member of this host that this rank reads no more, and free the memory that they read once they have
// published the same.
void Group::retire() {
  GroupHeap& heap = engine_.heap();
  GroupHeap::Retired retired{.memory = {{offset_, GroupLayout::memory_bytes(options_.members.size())}},
                             .blocks = {},
                             .is_unread = [] { return true; }};
  if (const auto details = board_->details(); details.first != 0) retired.memory.push_back(details);
  if (state_) {
    for (const int member : state_->topology.local_ranks())
      if (member != rank()) state_->members[index(member)].departed(rank()).store(1, std::memory_order_release);
    retired.blocks = state_->staging->surrender();
    if (proxies_.first != 0) retired.memory.push_back(proxies_);
  }
  // A member that had received everybody has gone on, also where this rank has not: it looks into this memory, and
  // writes there that it leaves.
  if (state_ || announced_) {
    const GroupMemoryView own(engine_.arena(), offset_, options_.members.size(), options_.layout);
    std::vector<int> readers;
    for (int member = 0; member < size(); ++member)
      if (member != rank() && options_.hosts[index(member)] == options_.hosts[index(rank())]) readers.push_back(member);
    retired.is_unread = [&engine = engine_, members = options_.members, readers, mine = own] {
      return std::ranges::all_of(readers, [&](int member) {
        return mine.departed(member).load(std::memory_order_acquire) != 0 ||
               engine.peer_status(members[index(member)]) != PeerStatus::kPresent;
      });
    };
  }
  heap.retire(std::move(retired));
}

void Group::attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts) {
  options_.hosts = hosts;
  Topology topology(hosts, options_.rank);
  std::vector<GroupMemoryView> views(options_.members.size());
  std::vector<GroupMemoryView> readers;
  std::vector<std::optional<GroupMemoryView>> posts(views.size());
  arenas_.assign(views.size(), nullptr);
  for (const int member : topology.local_ranks()) {
    arenas_[index(member)] = engine_.peer_arena(options_.members[index(member)]);
    views[index(member)] =
        GroupMemoryView(*arenas_[index(member)], offsets.at(index(member)), views.size(), options_.layout);
    posts[index(member)] = views[index(member)];
    if (member != rank()) readers.push_back(views[index(member)]);
  }
  GroupHeap& heap = engine_.heap();
  auto staging = std::make_unique<Staging>(heap.small_pool(options_.layout, 1 + topology.represented()),
                                           heap.slots_pool(options_.layout), views[index(rank())], readers);
  std::vector<const void*> sources(views.size());
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_->attach(std::move(posts));
  }
  state_.emplace(CollectiveState{.rank = options_.rank,
                                 .layout = options_.layout,
                                 .members = std::move(views),
                                 .arenas = &arenas_,
                                 .staging = std::move(staging),
                                 .sources = std::move(sources),
                                 .direct_bytes = kDirectBytes,
                                 .exchanged_bytes = options_.exchanged_bytes,
                                 .reads_everything = !topology.spans_hosts(),
                                 .reading = options_.reading,
                                 .global_ranks = &global_ranks_,
                                 .topology = std::move(topology)});
  for (int member = 0; member < size(); ++member) {
    const PeerMemory* peer =
        member == rank() || !is_local(member) ? nullptr : engine_.peer_memory(options_.members[index(member)]);
    state_->peers.push_back(peer);
    if (peer != nullptr && !peer->reads_everything()) state_->reads_everything = false;
  }
  if (spans_hosts()) make_relay();
}

// What the calls of a group that spans hosts need beside shared memory.
void Group::make_relay() {
  state_->messages.emplace(
      engine_.messages(), engine_.messages_mutex(), [this] { return engine_.pump(); }, view(), options_.limits);
  state_->on_failure = [this](Failure& failure, const Descriptor& call) {
    name_relays(failure, call);
    const bool is_explained = failure.kind != Failure::Kind::kTimeout || !failure.calls.empty();
    if (!is_explained && !is_completed()) look_at_calls(explained_peers(failure, false));
    break_with(own_view(cause_of(failure)), call);
  };
  if (!state_->topology.is_leader()) return;
  const size_t bytes = Proxies::bytes(state_->topology);
  proxies_ = {engine_.heap().take(bytes), bytes};
  Proxies::attach(*state_, engine_.arena(), proxies_.first);
  state_->relay = std::make_shared<Relay>(*state_);
  state_->mine().memory().proxies.store(proxies_.first, std::memory_order_release);
  state_->wake_peers();
}

void Group::handshake(const std::string& call, double seconds, LanguageRuntime& language) {
  announced_ = true;
  if (options_.hosts.empty()) options_.hosts.assign(options_.members.size(), 0);
  GroupCreation operation(engine_, options_.id, options_.members, offset_, call);
  WaitReport report;
  drive(operation, seconds, engine_.policy(), engine_, language, [&](const Operation&) {
    const WaitReport::Due due = report.look(engine_.wait_report_ns());
    if (due != WaitReport::Due::kNothing)
      engine_.report_wait(due, {engine_.rank(), call, operation.missing(), report.waited_ns()}, options_.id);
    return operation.examine();
  });
  refused_ = operation.refused();
  if (operation.failure() != nullptr) {
    Failure failure = *operation.failure();
    language.unlock();
    explain(failure, true);
    language.lock();
    refuse_to_begin(failure);
  }
  created_ = true;
  if (const std::optional<Failure> failure = misplaced(operation.offsets())) refuse_to_begin(*failure);
  attach(operation.offsets(), options_.hosts);
}

void Group::refuse_to_begin(const Failure& failure) {
  {  // members that had received everybody in time have gone on, and look here
    const std::lock_guard lock(engine_.messages_mutex());
    board_->post({.kind = Failure::Kind::kBroken, .reason = failure.summary()});
  }
  throw OperationFailed{failure, {}};
}

// The failure of a member that announced an invalid offset of its group memory.
std::optional<Failure> Group::misplaced(const std::vector<uint64_t>& offsets) const {
  for (size_t member = 0; member < offsets.size(); ++member) {
    const int world = options_.members[member];
    if (options_.hosts[member] != options_.hosts[index(rank())]) continue;
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
  return broken();
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
  if (failure == nullptr || (theirs != nullptr && theirs->left)) return std::nullopt;
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
  if (!failure) failure = Failure{.kind = Failure::Kind::kLost, .reason = kLeftBefore};
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
    if (peers.size() == kExplained) break;
    peers.push_back(has_world_ranks ? missing : options_.members[index(missing)]);
  }
  for (const int relay : failure.relays) peers.push_back(options_.members[index(relay)]);
  return peers;
}

// Before a failure is posted, which ends the calls of the ranks that receive it.
void Group::look_at_calls(const std::vector<int>& peers) {
  engine_.query_calls(peers, options_.id);
  std::vector<std::string> calls = engine_.known_calls(peers, options_.id);
  const std::lock_guard lock(reason_mutex_);
  for (size_t peer = 0; peer < peers.size(); ++peer)
    if (engine_.peer_arena(peers[peer]) != nullptr) seen_calls_[peers[peer]] = std::move(calls[peer]);
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

void Group::break_with(Failure failure, const Descriptor& call) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = failure.summary(&global_ranks_)};
  }
  completed_.store(true, std::memory_order_release);
  if (failure.call.sequence == 0) failure.call = call;
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_->post(failure);
  }
  if (state_) state_->wake_peers();
}

void Group::abort() {
  break_with({.kind = Failure::Kind::kAborted}, {});
  announce_leaving();
  engine_.announce_news();
}

// Members of other hosts learn by a message that this rank has left.
void Group::announce_leaving() {
  if (!created_) return;
  uint64_t last = sequence_.load(std::memory_order_acquire);  // first: a call may start meanwhile
  if (busy_.load(std::memory_order_acquire) && last != 0) --last;
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().close(options_.id, nullptr, spans_hosts(), last);
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  mark_left();
  announce_leaving();
  // From here on the progress thread does not touch this group: pending calls end now, and no thread waits for ever.
  engine_.progress().remove(this);
  examine_pending();
  end_pending();
  engine_.completed();
}

// End also the operations that moved while they were examined: no thread looks at them again.
void Group::end_pending() {
  const std::lock_guard driving(driving_);
  std::vector<std::shared_ptr<GroupOperation>> pending;
  {
    const std::lock_guard lock(queue_mutex_);
    pending = messages_;
    pending.insert(pending.end(), queue_.begin(), queue_.end());
  }
  for (const std::shared_ptr<GroupOperation>& operation : pending)
    if (!operation->is_completed()) operation->give_up(*broken());
}

void Group::mark_left() {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = "this rank left the group"};
  }
  completed_.store(true, std::memory_order_release);
  if (!state_) return;
  state_->mine().memory().state.store(MemberState::kLeft, std::memory_order_seq_cst);
  state_->wake_peers();
}

}  // namespace procgroup
