#include "group/group_handshakes.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "runtime/failure_record.hpp"

namespace procgroup {
namespace {

constexpr MessageKey kKey{0, uint64_t{1} << 63};  // no group has the identity 0
constexpr size_t kTextBytes = 512;

}  // namespace

// Followed by `bytes` bytes: of kMakes the call in words, of kEnded a failure record.
struct GroupHandshakes::Message {
  enum class Kind : uint32_t { kMakes, kLeft, kEnded };
  Kind kind;
  uint32_t bytes;
  uint64_t identity;
  uint64_t value;  // of kMakes the offset of the group memory, of kLeft the number of the last completed collective
};

GroupHandshakes::GroupHandshakes(Messages& messages, int rank, int world_size)
    : messages_(messages),
      rank_(rank),
      world_size_(world_size),
      largest_(sizeof(Message) + std::max(kTextBytes, largest_record(world_size))) {}

GroupHandshakes::~GroupHandshakes() {
  for (auto& [peer, inbox] : inboxes_)
    if (inbox.receive) messages_.cancel(*inbox.receive, Aborted{});
}

void GroupHandshakes::post(const std::vector<int>& members, Message header, std::span<const std::byte> rest) {
  header.bytes = static_cast<uint32_t>(rest.size());
  std::vector<std::byte> message(sizeof header + rest.size());
  std::memcpy(message.data(), &header, sizeof header);
  std::copy(rest.begin(), rest.end(), message.begin() + sizeof header);
  for (const int member : members)
    if (member != rank_) messages_.post(member, kKey, message);
}

void GroupHandshakes::open(uint64_t identity, std::vector<int> members, uint64_t memory, const std::string& call) {
  const std::span text(call.data(), std::min(call.size(), kTextBytes));
  post(members, {Message::Kind::kMakes, 0, identity, memory}, std::as_bytes(text));
  for (const int member : members)
    if (member != rank_) inboxes_.try_emplace(member, largest_);
  open_.emplace(identity, std::move(members));
}

void GroupHandshakes::close(uint64_t identity, const Failure* failure, bool notify, uint64_t last) {
  const auto found = open_.find(identity);
  if (found == open_.end()) return;
  if (failure != nullptr)
    post(found->second, {Message::Kind::kEnded, 0, identity, 0}, encode(*failure, world_size_));
  else if (notify)
    post(found->second, {Message::Kind::kLeft, 0, identity, last}, {});
  for (const int member : found->second) forget(member, identity);
  open_.erase(found);
}

void GroupHandshakes::forget(int peer, uint64_t identity) {
  if (received_.erase({peer, identity}) != 0) --inboxes_.at(peer).groups;
}

void GroupHandshakes::receive_arrived() {
  for (auto& [peer, inbox] : inboxes_) listen(peer, inbox);
}

// A receive that failed stays, and says why nothing more comes.
void GroupHandshakes::listen(int peer, Inbox& inbox) {
  for (;;) {
    if (!inbox.receive) inbox.receive = messages_.receive_up_to(peer, kKey, inbox.buffer.data(), inbox.buffer.size());
    if (!inbox.receive->is_completed() || inbox.receive->failure() != nullptr) return;
    if (inbox.groups >= kMostAhead + open_.size()) return;
    take(peer, std::span(inbox.buffer).first(inbox.receive->bytes));
    inbox.receive.reset();
  }
}

const Failure* GroupHandshakes::silenced(int peer) const {
  const auto found = inboxes_.find(peer);
  return found == inboxes_.end() || !found->second.receive ? nullptr : found->second.receive->failure();
}

void GroupHandshakes::take(int peer, std::span<const std::byte> message) {
  Message header;
  if (message.size() < sizeof header) return;
  std::memcpy(&header, message.data(), sizeof header);
  const std::span rest = message.subspan(sizeof header);
  if (rest.size() != header.bytes) return;
  const std::pair<int, uint64_t> about{peer, header.identity};
  if (header.kind == Message::Kind::kMakes) {
    const GroupHandshake made{.identity = header.identity,
                              .memory = header.value,
                              .call = readable(reinterpret_cast<const char*>(rest.data()), rest.size()),
                              .left = false,
                              .last = 0,
                              .ended = {},
                              .ended_ns = 0};
    if (received_.insert_or_assign(about, made).second) ++inboxes_.at(peer).groups;
    return;
  }
  const auto found = received_.find(about);
  if (found == received_.end()) return;  // this rank has closed the group already
  found->second.left = header.kind == Message::Kind::kLeft;
  if (found->second.left) {
    found->second.last = header.value;
    return;
  }
  found->second.ended = decode(rest, world_size_);
  if (!found->second.ended) found->second.ended = Broken{"it sent a failure record that cannot be read"};
  found->second.ended_ns = now_ns();
}

const GroupHandshake* GroupHandshakes::received(int peer, uint64_t identity) const {
  const auto found = received_.find({peer, identity});
  return found == received_.end() ? nullptr : &found->second;
}

const GroupHandshake* GroupHandshakes::conflicting(int peer, int64_t since_ns) const {
  for (auto entry = received_.lower_bound({peer, 0}); entry != received_.end() && entry->first.first == peer; ++entry) {
    const GroupHandshake& other = entry->second;
    if (open_.contains(entry->first.second) || other.left) continue;
    const bool disagreed = other.ended && other.ended->is<Mismatch>() && other.ended_ns >= since_ns;
    if (!other.ended || disagreed) return &other;
  }
  return nullptr;
}

}  // namespace procgroup
