// The begin and the end of a group on this rank.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/log.hpp"
#include "collectives/buffer_table.hpp"
#include "group/group.hpp"
#include "group/group_creation.hpp"
#include "group/group_operation.hpp"
#include "runtime/call_report.hpp"
#include "runtime/recording.hpp"

namespace procgroup {

Group::Group(Engine& engine, GroupOptions options) : engine_(engine), options_(std::move(options)) {
  name_ranks_as_engine();
  // An all_to_all shows the sizes of all its blocks in a small area.
  options_.layout.small_bytes = std::max(options_.layout.small_bytes, 2 * BufferTable::bytes(size()));
  offset_ = engine_.heap().take(GroupLayout::memory_bytes(options_.members.size()));
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_ = std::make_unique<FailureBoard>(engine_.messages(), view(), [this] { engine_.announce_news(); });
  }
  board_->share({engine_.arena(), offset_, options_.members.size(), options_.layout}, engine_.heap());
  engine_.add_name(options_.id, {options_.name, global_ranks_});
  std::vector<int> members;
  for (const int member : options_.members) members.push_back(engine_.recorded_rank(member));
  engine_.record().add_group({options_.id, options_.rank, size(), options_.name, name_ranks(members)});
  engine_.progress().add(this);
}

void Group::rename_ranks() {
  name_ranks_as_engine();
  engine_.add_name(options_.id, {options_.name, global_ranks_});
}

void Group::name_ranks_as_engine() {
  global_ranks_.clear();
  for (const int member : options_.members) global_ranks_.push_back(engine_.global_rank(member));
  for (int member = 0; member < size(); ++member)
    if (global_ranks_[index(member)] != member) return;
  global_ranks_.clear();  // they are the group ranks
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
  state_->stopped_members = [this] { return stopped_members(); };
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
    const Failure cause = own_view(cause_of(failure));
    keep_unreported(cause, call, false);
    break_with(cause, call);
  };
  if (!state_->topology.is_leader()) return;
  const size_t bytes = Proxies::bytes(state_->topology);
  proxies_ = {engine_.heap().take(bytes), bytes};
  Proxies::attach(*state_, engine_.arena(), proxies_.first);
  state_->relay = std::make_shared<Relay>(*state_);
  state_->mine().memory().proxies.store(proxies_.first, std::memory_order_release);
  state_->wake_peers();
}

void Group::handshake(const std::string& call, double seconds, LanguageRuntime& language, uint32_t source) {
  Descriptor making;
  making.group = options_.id;
  making.op = kMakesGroup;
  Recording recording(engine_.recorder(), making, source);
  announced_ = true;
  if (options_.hosts.empty()) options_.hosts.assign(options_.members.size(), 0);
  const std::string line = short_line(engine_.record().view().source_line(source));
  const std::string stated = line.empty() ? call : call + " at " + line;
  GroupCreation operation(engine_, options_.id, options_.members, offset_, stated);
  WaitReport report;
  DeadlockDetector watch(engine_, seconds, engine_.suspicious_ns());
  const auto look = [&](const Operation&) {
    const WaitReport::Due due = report.look(engine_.wait_report_ns(), seconds, {});
    if (due != WaitReport::Due::kNothing)
      engine_.report_wait(due, {engine_.rank(), stated, operation.missing(), report.waited_ns()}, options_.id);
    std::optional<Failure> failure = operation.examine();
    return failure ? failure : find_deadlock(watch, operation, [&] { return operation.awaited(); }, language);
  };
  std::optional<Failure> failure;
  {
    const Released released(language);
    complete(operation, seconds, engine_.policy(), engine_, language, look);
    if (operation.failure() != nullptr) failure = watch.announced().value_or(*operation.failure());
    if (failure) explain(*failure, true);
  }
  recording.end(operation.failure());
  refused_ = operation.refused();
  if (failure) refuse_to_begin(*failure);
  created_ = true;
  failure = misplaced(operation.offsets());
  if (failure) refuse_to_begin(*failure);
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

// The first collective that this rank will not complete once it fails in `call`.
Descriptor Group::first_without_this_rank(const Descriptor& call) const {
  if (call.sequence != 0 && !is_message(call.op)) return call;
  Descriptor first;
  first.group = options_.id;
  first.sequence = ended_.load(std::memory_order_acquire) + 1;
  return first;
}

void Group::break_with(Failure failure, const Descriptor& call) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = failure.summary(&global_ranks_)};
    const bool is_end_of_peer = failure.kind == Failure::Kind::kLost || failure.kind == Failure::Kind::kFailed;
    if (is_end_of_peer && failure.peer >= 0 && failure.peer != rank()) {
      lost_ = Failure{.kind = Failure::Kind::kLost, .peer = failure.peer, .reason = reason_->reason};
      engine_.identify(*lost_, options_.members[index(failure.peer)]);
    }
  }
  completed_.store(true, std::memory_order_release);
  if (is_logged(LogLevel::kInfo))
    log_line(LogLevel::kInfo, "group " + name() + " has ended: " + failure.summary(&global_ranks_),
             engine_.global_rank(engine_.rank()));
  if (failure.call.sequence == 0) failure.call = call;
  // Another member's failure in a later call does not end an earlier one. Members that wait there for this rank read
  // its own.
  const Descriptor first = first_without_this_rank(call);
  if (!concerns_call(failure.call, first)) {
    failure.call = first;
    failure.relayed = false;
  }
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_->post(failure);
  }
  if (failure.kind == Failure::Kind::kMismatch && spans_hosts())
    for (int member = 0; member < size(); ++member)
      if (!is_local(member)) engine_.post_source_line(options_.members[index(member)], call);
  if (state_) state_->wake_peers();
  if (end_device_work_) end_device_work_();
}

void Group::abort() {
  break_with({.kind = Failure::Kind::kAborted}, {});
  announce_leaving();
  engine_.announce_news();
}

// Where earlier calls have not completed, the number of the call is not known: then the failure is one of all calls.
void Group::fail_call(Descriptor call, std::string reason) {
  call.group = options_.id;
  const bool is_next = queued_.load(std::memory_order_acquire) == 0 && !busy_.load(std::memory_order_acquire);
  if (is_next) call.sequence = sequence_.load(std::memory_order_acquire) + 1;
  break_with({.kind = Failure::Kind::kFailed, .peer = rank(), .reason = std::move(reason)}, call);
  engine_.announce_news();
}

// Members of other hosts learn by a message that this rank has left.
void Group::announce_leaving() {
  if (!created_) return;
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().close(options_.id, nullptr, spans_hosts(), ended_.load(std::memory_order_acquire));
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  // From here on the progress thread does not touch this group: pending calls end now, and no thread waits for ever.
  engine_.progress().remove(this);
  // Another rank's work would wait on its GPU for that of this rank, also beyond the end of its group.
  if (has_unfinished_device_calls())
    break_with(
        {.kind = Failure::Kind::kBroken, .reason = "this rank left the group before its calls on a GPU had ended"}, {});
  break_with_unseen_mismatch();
  mark_left();
  announce_leaving();
  examine_pending();
  end_pending();
  engine_.completed();
}

// While a call is running, that call compares the earlier ones itself.
void Group::break_with_unseen_mismatch() {
  if (!state_ || is_completed() || busy_.exchange(true, std::memory_order_acquire)) return;
  const uint64_t last = sequence_.load(std::memory_order_relaxed);
  std::optional<Failure> mismatch = unseen_mismatch(*state_, last, last + 1);
  busy_.store(false, std::memory_order_release);
  if (!mismatch) return;
  const Descriptor call = mismatch->call;
  keep_unreported(*mismatch, call, true);
  break_with(*std::move(mismatch), call);
}

std::optional<OperationFailed> Group::take_unraised() {
  const std::lock_guard lock(reason_mutex_);
  return is_unawaited_ ? std::exchange(unreported_, std::nullopt) : std::nullopt;
}

// End also the operations that moved while they were examined: no thread looks at them again.
void Group::end_pending() {
  const std::lock_guard driving(driving_);
  std::vector<std::shared_ptr<GroupOperation>> pending;
  std::vector<CapturedCall> captured;  // let go of without the mutex: that may run Python
  {
    const std::lock_guard lock(queue_mutex_);
    captured = std::exchange(captured_, {});
    if (!captured.empty()) engine_.record().set_replays(options_.id, {});  // this rank looks at them no more
    pending.assign(messages_.begin(), messages_.end());
    for (const auto& [key, queue] : device_queues_) pending.insert(pending.end(), queue.begin(), queue.end());
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
