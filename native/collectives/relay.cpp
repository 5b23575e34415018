#include "collectives/relay.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "base/clock.hpp"
#include "collectives/block_counts.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/collective_call.hpp"
#include "collectives/small_call.hpp"
#include "messages/transfer.hpp"

namespace procgroup {
namespace {

static_assert(std::has_unique_object_representations_v<Descriptor>, "descriptors are sent and compared as bytes");

// How long a leader waits for the other ranks of its host before it sends what it has.
constexpr int64_t kPatienceNs = 5'000'000;
constexpr size_t kMessageBytes = 64 * 1024;

struct EntryHead {
  int32_t rank;
  uint32_t bytes;  // of the descriptor and what follows it
};

size_t counts_bytes(const CollectiveState& state) { return 2 * state.members.size() * sizeof(uint64_t); }

size_t largest_entry(const CollectiveState& state) {
  return sizeof(EntryHead) + sizeof(Descriptor) + counts_bytes(state) + state.layout.small_bytes;
}

void append(std::vector<std::byte>& message, const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  message.insert(message.end(), begin, begin + bytes);
}

// The counts of an all_to_all that one rank has announced, each read once: that rank may change them at any time.
std::vector<uint64_t> announced_counts(const CollectiveState& state, const Request& request, int rank) {
  std::vector<uint64_t> counts;
  if (rank == state.rank) {
    for (const Block& block : request.inputs) counts.push_back(block.announced());
    for (const Block& block : request.outputs) counts.push_back(block.announced());
    return counts;
  }
  const BufferTable table(state.member(rank).small(request.descriptor.sequence), state.size());
  for (int peer = 0; peer < state.size(); ++peer) counts.push_back(table.input(peer).count);
  for (int peer = 0; peer < state.size(); ++peer) counts.push_back(table.output(peer).count);
  return counts;
}

// Visit, as offsets and lengths in bytes, the small elements that one rank has for the ranks of a host. `counts` are
// those of its all_to_all. Returns false, perhaps after some visits, when the elements do not fit.
template <class Visit>
bool for_each_run(const CollectiveState& state, const Request& request, const std::vector<uint64_t>& counts, int from,
                  int host, Visit visit) {
  const Descriptor& call = request.descriptor;
  const size_t element = dtype_size(call.dtype);
  const bool by_pair = is_by_pair(call.op);
  const bool has_blocks = has_input_blocks(call.op);
  const size_t room = (state.layout.small_bytes - (by_pair ? BufferTable::bytes(state.size()) : 0)) / element;
  uint64_t before = 0;
  uint64_t one = 0;  // without blocks, the same elements are for all ranks that get any
  for (int to = 0; to < state.size(); ++to) {
    const uint64_t count =
        by_pair ? announced_count(call, counts[static_cast<size_t>(to)]) : block_count(request, from, to);
    if (count > room || before > room - count) return false;
    if (has_blocks && count > 0 && state.topology.host_of(to) == host) visit(before * element, count * element);
    if (has_blocks) before += count;
    if (!has_blocks && state.topology.host_of(to) == host) one = std::max(one, count);
  }
  if (one > 0) visit(size_t{0}, one * element);
  return true;
}

// The address of a rank's small elements, once it has announced the call.
std::byte* elements_of(const CollectiveState& state, const Descriptor& call, int rank) {
  const GroupMemoryView& view = state.member(rank);
  if (is_by_pair(call.op)) return BufferTable(view.small(call.sequence), state.size()).data();
  return view.payload(call.sequence, largest_contribution(call, state.size()));
}

bool may_carry_elements(const CollectiveState& state, const Descriptor& call) {
  return is_by_pair(call.op) || is_small(state, call);
}

// The announcement of `rank`, for the ranks of `host`.
std::vector<std::byte> make_entry(const CollectiveState& state, const Request& request, int rank, int host) {
  const Descriptor& call = request.descriptor;
  const Descriptor& announced = state.member(rank).descriptor(call.sequence);
  std::vector<std::byte> entry(sizeof(EntryHead));
  append(entry, &announced, sizeof announced);
  if (std::memcmp(&announced, &call, sizeof call) == 0 && may_carry_elements(state, call)) {
    std::vector<uint64_t> counts;
    if (is_by_pair(call.op)) {
      counts = announced_counts(state, request, rank);
      append(entry, counts.data(), counts.size() * sizeof(uint64_t));
    }
    const size_t head = entry.size();
    const std::byte* elements = elements_of(state, call, rank);
    const bool fits = for_each_run(state, request, counts, rank, host,
                                   [&](size_t offset, size_t bytes) { append(entry, elements + offset, bytes); });
    if (!fits) entry.resize(head);
  }
  const EntryHead head{rank, static_cast<uint32_t>(entry.size() - sizeof(EntryHead))};
  std::memcpy(entry.data(), &head, sizeof head);
  return entry;
}

}  // namespace

void Proxies::attach(CollectiveState& state, const Arena& arena, uint64_t offset) {
  const size_t size = state.members.size();
  for (int member = 0; member < state.size(); ++member) {
    if (state.topology.is_local(member)) continue;
    state.members[static_cast<size_t>(member)] = GroupMemoryView(arena, offset, size, state.layout);
    offset += stride(size);
  }
}

void attach_proxies(CollectiveState& state) {
  const int leader = state.topology.leader_of(state.topology.own_host());
  const int remote = state.topology.leader_of(state.topology.own_host() == 0 ? 1 : 0);
  if (state.member(remote)) return;
  const GroupMemoryView& theirs = state.member(leader);
  const uint64_t offset = theirs.memory().proxies.load(std::memory_order_acquire);
  if (offset != 0) Proxies::attach(state, theirs.arena(), offset);
}

Relay::Relay(const CollectiveState& state)
    : capacity_(std::max(kMessageBytes, largest_entry(state))),
      hosts_(static_cast<size_t>(state.topology.hosts())),
      small_(state.members.size()) {
  uint64_t offset = 0;
  for (int member = 0; member < state.size(); ++member)
    if (!state.topology.is_local(member))
      small_[static_cast<size_t>(member)] = offset += state.layout.small_block_bytes();
  for (int host = 0; host < state.topology.hosts(); ++host)
    if (host != state.topology.own_host())
      hosts_[static_cast<size_t>(host)].buffer = std::make_unique_for_overwrite<std::byte[]>(capacity_);
}

Relay::~Relay() = default;

void Relay::start(CollectiveState& state, uint64_t sequence) {
  sequence_ = sequence;
  failure_.reset();
  without_elements_ = -1;
  since_ns_ = now_ns();
  sent_.assign(state.topology.local_ranks().size(), false);
  unsent_ = sent_.size();
  unannounced_ = 0;
  for (int host = 0; host < state.topology.hosts(); ++host) {
    if (host == state.topology.own_host()) continue;
    hosts_[static_cast<size_t>(host)].unannounced = state.topology.ranks_on(host).size();
    unannounced_ += state.topology.ranks_on(host).size();
    post_receive(state, host);
  }
}

void Relay::post_receive(CollectiveState& state, int host) {
  GroupMessages& through = *state.messages;
  Host& mine = hosts_[static_cast<size_t>(host)];
  const int leader = through.group.world_rank(state.topology.leader_of(host));
  mine.receive = through.messages.receive_up_to(leader, through.announcement_key(), mine.buffer.get(), capacity_);
}

bool Relay::advance(CollectiveState& state, const Request& request) {
  const bool forwarded = unsent_ > 0 && forward(state, request);
  const bool collected = unannounced_ > 0 && collect(state, request);
  return forwarded || collected;
}

bool Relay::has_work(const CollectiveState& state, uint64_t sequence) const {
  if (sequence_ != sequence) return true;
  const std::vector<int>& ranks = state.topology.local_ranks();
  for (size_t index = 0; unsent_ > 0 && index < ranks.size(); ++index)
    if (!sent_[index] && state.has_announced(ranks[index], sequence)) return true;
  return unannounced_ > 0 && std::ranges::any_of(hosts_, [](const Host& host) {
           return host.unannounced > 0 && host.receive->is_completed();
         });
}

bool Relay::forward(CollectiveState& state, const Request& request) {
  const std::vector<int>& ranks = state.topology.local_ranks();
  std::vector<int> ready;
  for (size_t index = 0; index < ranks.size(); ++index)
    if (!sent_[index] && state.has_announced(ranks[index], request.descriptor.sequence)) ready.push_back(ranks[index]);
  if (ready.empty() || (ready.size() < unsent_ && now_ns() - since_ns_ < kPatienceNs)) return false;
  const GroupMessages& through = *state.messages;
  for (int host = 0; host < state.topology.hosts(); ++host) {
    if (host == state.topology.own_host()) continue;
    const int leader = through.group.world_rank(state.topology.leader_of(host));
    std::vector<std::byte> message;
    for (const int rank : ready) {
      const std::vector<std::byte> entry = make_entry(state, request, rank, host);
      if (!message.empty() && message.size() + entry.size() > kMessageBytes)
        through.messages.post(leader, through.announcement_key(), std::exchange(message, {}));
      append(message, entry.data(), entry.size());
    }
    through.messages.post(leader, through.announcement_key(), std::move(message));
  }
  for (const int rank : ready) sent_[static_cast<size_t>(state.topology.index_of(rank))] = true;
  unsent_ -= ready.size();
  return true;
}

bool Relay::collect(CollectiveState& state, const Request& request) {
  bool collected = false;
  for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
    Host& theirs = hosts_[static_cast<size_t>(host)];
    while (!failure_ && theirs.unannounced > 0 && theirs.receive->is_completed()) {
      collected = true;
      if (const Failure* failure = theirs.receive->failure()) {
        failure_ = state.messages->group.by_group_rank(*failure);
        return true;
      }
      take(state, request, host, {theirs.buffer.get(), theirs.receive->bytes});
      if (!failure_ && theirs.unannounced > 0) post_receive(state, host);
    }
  }
  if (collected) state.wake_peers();
  return collected;
}

void Relay::take(CollectiveState& state, const Request& request, int host, std::span<const std::byte> message) {
  const int leader = state.topology.leader_of(host);
  do {
    EntryHead head{};
    if (message.size() >= sizeof head) std::memcpy(&head, message.data(), sizeof head);
    const bool is_whole = head.bytes >= sizeof(Descriptor) && head.bytes <= message.size() - sizeof head;
    const bool is_theirs = head.rank >= 0 && head.rank < state.size() && state.topology.host_of(head.rank) == host;
    if (!is_whole || !is_theirs || state.has_announced(head.rank, request.descriptor.sequence)) {
      failure_ = Failed{.peer = leader, .reason = "it sent an announcement that cannot be read"};
      return;
    }
    take_entry(state, request, head.rank, message.subspan(sizeof head, head.bytes));
    message = message.subspan(sizeof head + head.bytes);
  } while (!failure_ && !message.empty());
}

// Announce the call of a member of another host to this host's ranks.
void Relay::take_entry(CollectiveState& state, const Request& request, int rank, std::span<const std::byte> entry) {
  const Descriptor& call = request.descriptor;
  const GroupMemoryView& proxy = state.member(rank);
  const Descriptor announced = Descriptor::copied_from(entry.data());
  const uint64_t mine = state.member(state.rank).announcement(call.sequence).small;
  proxy.place_small(call.sequence, mine == 0 ? 0 : mine + small_[static_cast<size_t>(rank)]);
  const bool agrees = std::memcmp(&announced, &call, sizeof call) == 0;
  const std::span<const std::byte> elements = entry.subspan(sizeof announced);
  if (agrees && may_carry_elements(state, call) && !take_elements(state, request, rank, elements)) {
    if (!elements.empty()) {
      failure_ = Failed{.peer = rank,
                        .reason = "it sent " + std::to_string(elements.size()) + " bytes that do not fit its call"};
      return;
    }
    without_elements_ = rank;
  }
  Announcement& announcement = proxy.announcement(call.sequence);
  proxy.descriptor(call.sequence) = announced;
  // The sequence number of a call that is out of step is part of its fingerprint.
  announcement.fingerprint = announced.fingerprint();
  announcement.sequence.store(call.sequence, std::memory_order_seq_cst);
  --hosts_[static_cast<size_t>(state.topology.host_of(rank))].unannounced;
  if (--unannounced_ == 0) check_elements(state, request);
}

// Copy a rank's counts and elements to its proxy; false when they are not those of its call.
bool Relay::take_elements(CollectiveState& state, const Request& request, int rank,
                          std::span<const std::byte> elements) {
  const Descriptor& call = request.descriptor;
  std::vector<uint64_t> counts;
  if (is_by_pair(call.op)) {
    if (elements.size() < counts_bytes(state)) return false;
    counts.resize(2 * state.members.size());
    std::memcpy(counts.data(), elements.data(), counts_bytes(state));
    elements = elements.subspan(counts_bytes(state));
    const BufferTable table(state.member(rank).small(call.sequence), state.size());
    table.head() = {};
    for (int peer = 0; peer < state.size(); ++peer) {
      table.input(peer).count = counts[static_cast<size_t>(peer)];
      table.output(peer).count = counts[state.members.size() + static_cast<size_t>(peer)];
    }
  }
  const int host = state.topology.own_host();
  size_t expected = 0;
  const auto measure = [&](size_t, size_t bytes) { expected += bytes; };
  if (!for_each_run(state, request, counts, rank, host, measure)) return elements.empty();
  if (elements.size() != expected) return false;
  std::byte* to = elements_of(state, call, rank);
  for_each_run(state, request, counts, rank, host, [&](size_t offset, size_t bytes) {
    std::memcpy(to + offset, elements.data(), bytes);
    elements = elements.subspan(bytes);
  });
  return true;
}

// A rank may come without elements only when its leader has announced another call, which is a mismatch.
void Relay::check_elements(CollectiveState& state, const Request& request) {
  if (without_elements_ < 0) return;
  const Descriptor& call = request.descriptor;
  const int leader = state.topology.leader_of(state.topology.host_of(without_elements_));
  if (std::memcmp(&state.member(leader).descriptor(call.sequence), &call, sizeof call) == 0)
    failure_ = Failed{.peer = without_elements_, .reason = "it sent no elements with its call"};
}

void Relay::cancel(CollectiveState& state) {
  for (Host& host : hosts_)
    if (host.receive && !host.receive->is_completed()) state.messages->messages.cancel(*host.receive, Aborted{});
  unsent_ = 0;
  unannounced_ = 0;
}

}  // namespace procgroup
