#include "group/members.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "collectives/buffer_table.hpp"
#include "group/group.hpp"
#include "group/group_operation.hpp"

namespace procgroup {
namespace {

size_t index(int rank) { return static_cast<size_t>(rank); }

}  // namespace

Members::Members(Group& group, Engine& engine, GroupOptions& options)
    : group_(group), engine_(engine), options_(options) {
  // An all_to_all shows the sizes of all its blocks in a small area.
  options_.layout.small_bytes = std::max(options_.layout.small_bytes, 2 * BufferTable::bytes(group_.size()));
  adopt_ranks();
  offset_ = engine_.heap().take(GroupLayout::memory_bytes(options_.members.size()));
  {
    const std::lock_guard lock(engine_.messages_mutex());
    board_ = std::make_unique<FailureBoard>(engine_.messages(), view(), [this] { engine_.announce_news(); });
  }
  board_->share({engine_.arena(), offset_, options_.members.size(), options_.layout}, engine_.heap());
}

void Members::close() {
  retire();
  const std::lock_guard lock(engine_.messages_mutex());
  board_.reset();
}

void Members::post(const Failure& failure) {
  const std::lock_guard lock(engine_.messages_mutex());
  board_->post(failure);
}

// Of a mismatch, for ranks that find it too: they cannot read this rank's record.
void Members::post_source_lines(const Descriptor& call) const {
  for (int member = 0; member < group_.size(); ++member)
    if (!is_local(member)) engine_.post_source_line(group_.world_rank(member), call);
}

void Members::announce_leaving(uint64_t last) {
  if (!created_) return;
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().close(options_.id, nullptr, spans_hosts(), last);
}

void Members::attach(const std::vector<uint64_t>& offsets) {
  Topology topology(options_.hosts, options_.rank);
  std::vector<GroupMemoryView> views(options_.members.size());
  std::vector<GroupMemoryView> readers;
  std::vector<std::optional<GroupMemoryView>> posts(views.size());
  arenas_.assign(views.size(), nullptr);
  for (const int member : topology.local_ranks()) {
    arenas_[index(member)] = engine_.peer_arena(options_.members[index(member)]);
    views[index(member)] =
        GroupMemoryView(*arenas_[index(member)], offsets.at(index(member)), views.size(), options_.layout);
    posts[index(member)] = views[index(member)];
    if (member != options_.rank) readers.push_back(views[index(member)]);
  }
  GroupHeap& heap = engine_.heap();
  auto staging = std::make_unique<Staging>(heap.small_pool(options_.layout, 1 + topology.represented()),
                                           heap.slots_pool(options_.layout), views[index(options_.rank)], readers);
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
  state_->stopped_members = [this] { return group_.watch().stopped_members(); };
  for (int member = 0; member < group_.size(); ++member) {
    const PeerMemory* peer =
        member == options_.rank || !is_local(member) ? nullptr : engine_.peer_memory(options_.members[index(member)]);
    state_->peers.push_back(peer);
    if (peer != nullptr && !peer->reads_everything()) state_->reads_everything = false;
  }
  if (spans_hosts()) make_relay();
}

// What the calls of a group that spans hosts need beside shared memory.
void Members::make_relay() {
  state_->messages.emplace(
      engine_.messages(), engine_.messages_mutex(), [this] { return engine_.pump(); }, view(), options_.limits);
  state_->on_failure = [this](Failure& failure, const Descriptor& call) {
    group_.watch().add_relays(failure, call);
    const Failure cause = group_.watch().cause_of(failure);
    group_.end().keep_unreported(cause, call, false);
    group_.end().break_with(cause, call);
  };
  if (!state_->topology.is_leader()) return;
  const size_t bytes = Proxies::bytes(state_->topology);
  proxies_ = {engine_.heap().take(bytes), bytes};
  Proxies::attach(*state_, engine_.arena(), proxies_.first);
  state_->relay = std::make_shared<Relay>(*state_);
  state_->mine().memory().proxies.store(proxies_.first, std::memory_order_release);
  state_->wake_peers();
}

// Publish to every member of this host that this rank reads no more, and free the memory that they read once they have
// published the same.
void Members::retire() {
  GroupHeap& heap = engine_.heap();
  GroupHeap::Retired retired{.memory = {{offset_, GroupLayout::memory_bytes(options_.members.size())}},
                             .blocks = {},
                             .is_unread = [] { return true; }};
  if (const auto details = board_->details(); details.first != 0) retired.memory.push_back(details);
  if (state_) {
    for (const int member : state_->topology.local_ranks())
      if (member != options_.rank)
        state_->members[index(member)].departed(options_.rank).store(1, std::memory_order_release);
    retired.blocks = state_->staging->surrender();
    if (proxies_.first != 0) retired.memory.push_back(proxies_);
  }
  // A member that had received everybody has gone on, also where this rank has not: it looks into this memory, and
  // writes there that it leaves.
  if (state_ || announced_) {
    const GroupMemoryView own(engine_.arena(), offset_, options_.members.size(), options_.layout);
    std::vector<int> readers;
    for (int member = 0; member < group_.size(); ++member)
      if (member != options_.rank && options_.hosts[index(member)] == options_.hosts[index(options_.rank)])
        readers.push_back(member);
    retired.is_unread = [&engine = engine_, members = options_.members, readers, mine = own] {
      return std::ranges::all_of(readers, [&](int member) {
        return mine.departed(member).load(std::memory_order_acquire) != 0 ||
               engine.peer_status(members[index(member)]) != PeerStatus::kPresent;
      });
    };
  }
  heap.retire(std::move(retired));
}

void Members::adopt_ranks() {
  global_ranks_.clear();
  for (const int member : options_.members) global_ranks_.push_back(engine_.global_rank(member));
  for (int member = 0; member < group_.size(); ++member)
    if (global_ranks_[index(member)] != member) return;
  global_ranks_.clear();  // they are the group ranks
}

int Members::group_rank(int world_rank) const {
  const auto found = std::find(options_.members.begin(), options_.members.end(), world_rank);
  return found == options_.members.end() ? -1 : static_cast<int>(found - options_.members.begin());
}

bool Members::has_lost_member() const {
  return std::ranges::any_of(options_.members, [&](int peer) {
    return peer != engine_.rank() && engine_.peer_status(peer) == PeerStatus::kLost;
  });
}

std::optional<MemberEnd> Members::end_of(int member, bool by_connection) const {
  using How = MemberEnd::How;
  std::optional<MemberEnd> process = process_end(member);
  if (process && process->how <= How::kLost) return process;
  if (by_connection)
    if (std::optional<Failure> lost = disconnected(member)) return MemberEnd{How::kDisconnected, *std::move(lost)};
  // Read after the state of the process: the reason why a member gave up says more than that it left afterwards.
  const bool is_gone = process && process->how == How::kLeft;
  if (std::optional<Failure> failure = posted(member)) {
    const Descriptor& call = failure->call;
    const bool is_of_all_calls = is_gone || call.sequence == 0 || is_message(call.op);
    return MemberEnd{How::kFailed, *failure, is_of_all_calls ? std::nullopt : std::optional(call.sequence - 1)};
  }
  if (is_gone) return process;
  if (is_local(member)) {
    const MemberState state = state_->member(member).memory().state.load(std::memory_order_acquire);
    if (state == MemberState::kLeft) return MemberEnd{How::kLeft, left_before(member)};
  } else if (std::optional<MemberEnd> end = end_by_handshake(member)) {
    return end;
  }
  return process;
}

// As this rank reports it.
std::optional<MemberEnd> Members::process_end(int member) const {
  std::optional<MemberEnd> end = engine_.end_of(options_.members[index(member)]);
  if (end) end->why.renumber([member](int) { return member; });
  return end;
}

// A member that has left in order has done its part.
std::optional<Failure> Members::disconnected(int member) const {
  if (is_local(member)) return std::nullopt;
  const int peer = options_.members[index(member)];
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().receive_arrived();
  const GroupHandshake* theirs = engine_.handshakes().received(peer, options_.id);
  const Failure* failure = engine_.messages().peer_failure(peer);
  const bool left = engine_.messages().has_left(peer) || (theirs != nullptr && theirs->left);
  if (failure == nullptr || left) return std::nullopt;
  return view().by_group_rank(*failure);
}

// What other messages than its posts say of a member of another host. It may complete a collective and leave before its
// leader's message with its announcement has come here.
std::optional<MemberEnd> Members::end_by_handshake(int member) const {
  using How = MemberEnd::How;
  if (!created_) return std::nullopt;
  uint64_t last = 0;
  {
    const std::lock_guard lock(engine_.messages_mutex());
    engine_.handshakes().receive_arrived();
    const GroupHandshake* theirs = engine_.handshakes().received(options_.members[index(member)], options_.id);
    if (theirs == nullptr || !(theirs->ended || theirs->left)) return std::nullopt;
    if (theirs->ended)
      return MemberEnd{How::kFailed,
                       as_seen_by(options_.rank, member, view().by_group_rank(*theirs->ended), &global_ranks_)};
    last = theirs->last;
  }
  return MemberEnd{How::kLeft, left_before(member), last};
}

// A member that left the group in order does not come to this call.
Failure Members::left_before(int member) const {
  if (std::optional<MemberEnd> end = process_end(member); end && end->why.is<Failed>()) return std::move(end->why);
  Lost lost{.peer = member, .reason = "it left the group before this call", .left = true};
  engine_.identify(lost, options_.members[index(member)]);
  return lost;
}

std::optional<Failure> Members::posted(int member) const {
  std::optional<Failure> failure;
  if (is_local(member)) {
    failure = board_->read_memory(member);
  } else {
    const std::lock_guard lock(engine_.messages_mutex());
    failure = board_->read(member);
  }
  if (!failure) return std::nullopt;
  // An exception of its program ends the calls in which it is, which is no reason of theirs.
  if (std::optional<MemberEnd> end = process_end(member); end && end->how == MemberEnd::How::kRaised)
    return std::move(end->why);
  failure->relayed = true;
  return as_seen_by(options_.rank, member, *std::move(failure), &global_ranks_);
}

// The failure of a member that announced an invalid offset of its group memory.
std::optional<Failure> Members::misplaced(const std::vector<uint64_t>& offsets) const {
  for (size_t member = 0; member < offsets.size(); ++member) {
    const int world = options_.members[member];
    if (options_.hosts[member] != options_.hosts[index(options_.rank)]) continue;
    try {
      GroupMemoryView(*engine_.peer_arena(world), offsets[member], options_.members.size(), options_.layout);
    } catch (const std::out_of_range& error) {
      return Failed{.peer = world, .reason = error.what()};
    }
  }
  return std::nullopt;
}

std::vector<std::string> Members::source_lines(const Descriptor& call) const {
  if (is_message(call.op)) return {};
  std::vector<std::string> lines(index(group_.size()));
  const auto find = [&] {
    for (int member = 0; member < group_.size(); ++member) {
      std::string& line = lines[index(member)];
      if (line.empty()) line = engine_.source_line(options_.members[index(member)], call);
    }
    return std::ranges::none_of(lines, [](const std::string& line) { return line.empty(); });
  };
  spans_hosts() ? engine_.await_answers(find) : static_cast<void>(find());
  return lines;
}

}  // namespace procgroup
