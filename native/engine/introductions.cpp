#include "engine/introductions.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.hpp"

namespace procgroup {
namespace {

constexpr MessageKey kKey{0, uint64_t{1} << 63};  // no group has the identity 0
constexpr size_t kTextBytes = 512;
constexpr size_t kMissingRanks = 256;

}  // namespace

// Followed by `missing` ranks and `text` bytes.
struct Introductions::Notice {
  enum class Kind : uint32_t { kMakes, kLeft, kEnded };
  Kind kind;
  Failure::Kind failure;
  uint8_t pad[3];
  uint64_t identity;
  uint64_t memory;
  double seconds;
  int64_t pid;
  int32_t peer;
  uint32_t missing;
  uint32_t text;
  uint32_t pad_at_end;
};

Introductions::~Introductions() {
  for (auto& [peer, ear] : ears_)
    if (ear.receive) messages_.cancel(*ear.receive, Failure{.kind = Failure::Kind::kAborted});
}

void Introductions::post(const std::vector<int>& members, const Notice& notice, const std::string& text,
                         const std::vector<int>& missing) {
  Notice header = notice;
  header.text = static_cast<uint32_t>(std::min(text.size(), kTextBytes));
  header.missing = static_cast<uint32_t>(std::min(missing.size(), kMissingRanks));
  std::vector<std::byte> message(sizeof header + header.missing * sizeof(int) + header.text);
  std::memcpy(message.data(), &header, sizeof header);
  if (header.missing > 0) std::memcpy(message.data() + sizeof header, missing.data(), header.missing * sizeof(int));
  std::memcpy(message.data() + sizeof header + header.missing * sizeof(int), text.data(), header.text);
  for (const int member : members)
    if (member != rank_) messages_.post(member, kKey, message);
}

void Introductions::open(uint64_t identity, std::vector<int> members, uint64_t memory, const std::string& call) {
  Notice notice{};
  notice.kind = Notice::Kind::kMakes;
  notice.identity = identity;
  notice.memory = memory;
  post(members, notice, call, {});
  for (const int member : members)
    if (member != rank_) ears_.try_emplace(member);
  open_.emplace(identity, std::move(members));
}

void Introductions::close(uint64_t identity, const Failure* failure, bool tell) {
  const auto found = open_.find(identity);
  if (found == open_.end()) return;
  Notice notice{};
  notice.kind = Notice::Kind::kLeft;
  notice.identity = identity;
  if (failure != nullptr) {
    notice.kind = Notice::Kind::kEnded;
    notice.failure = failure->kind;
    notice.seconds = failure->seconds;
    notice.peer = failure->peer;
    notice.pid = failure->pid;
    const bool in_words = failure->kind == Failure::Kind::kLost || failure->kind == Failure::Kind::kFailed ||
                          failure->kind == Failure::Kind::kMismatch;
    post(found->second, notice, in_words ? failure->reason : failure->summary(), failure->missing);
  } else if (tell) {
    post(found->second, notice, "", {});
  }
  for (const int member : found->second) forget(member, identity);
  open_.erase(found);
}

void Introductions::forget(int peer, uint64_t identity) {
  if (heard_.erase({peer, identity}) != 0) --ears_.at(peer).groups;
}

void Introductions::collect() {
  for (auto& [peer, ear] : ears_) listen(peer, ear);
}

// A receive that failed stays, and says why nothing more comes.
void Introductions::listen(int peer, Ear& ear) {
  for (;;) {
    if (!ear.receive) ear.receive = messages_.receive_up_to(peer, kKey, ear.buffer.data(), ear.buffer.size());
    if (!ear.receive->is_over() || ear.receive->failure() != nullptr) return;
    if (ear.groups >= kMostAhead + open_.size()) return;
    take(peer, ear.buffer.data(), ear.receive->bytes);
    ear.receive.reset();
  }
}

const Failure* Introductions::silenced(int peer) const {
  const auto found = ears_.find(peer);
  return found == ears_.end() || !found->second.receive ? nullptr : found->second.receive->failure();
}

void Introductions::take(int peer, const std::byte* message, size_t bytes) {
  Notice notice;
  if (bytes < sizeof notice) return;
  std::memcpy(&notice, message, sizeof notice);
  if (bytes != sizeof notice + size_t{notice.missing} * sizeof(int) + notice.text) return;
  const std::byte* ranks = message + sizeof notice;
  const std::string text = readable(reinterpret_cast<const char*>(ranks) + notice.missing * sizeof(int), notice.text);
  const std::pair<int, uint64_t> about{peer, notice.identity};
  if (notice.kind == Notice::Kind::kMakes) {
    const Introduction made{
        .identity = notice.identity, .memory = notice.memory, .call = text, .left = false, .ended = {}, .ended_ns = 0};
    if (heard_.insert_or_assign(about, made).second) ++ears_.at(peer).groups;
    return;
  }
  const auto found = heard_.find(about);
  if (found == heard_.end()) return;  // this rank has closed the group already
  found->second.left = notice.kind == Notice::Kind::kLeft;
  if (found->second.left) return;
  Failure failure{.kind = notice.failure,
                  .peer = notice.peer,
                  .pid = notice.pid,
                  .reason = text,
                  .seconds = notice.seconds,
                  .missing = std::vector<int>(notice.missing)};
  if (notice.missing > 0) std::memcpy(failure.missing.data(), ranks, notice.missing * sizeof(int));
  found->second.ended = std::move(failure);
  found->second.ended_ns = now_ns();
}

const Introduction* Introductions::heard(int peer, uint64_t identity) const {
  const auto found = heard_.find({peer, identity});
  return found == heard_.end() ? nullptr : &found->second;
}

const Introduction* Introductions::conflicting(int peer, int64_t since_ns) const {
  for (auto entry = heard_.lower_bound({peer, 0}); entry != heard_.end() && entry->first.first == peer; ++entry) {
    const Introduction& other = entry->second;
    if (open_.contains(entry->first.second) || other.left) continue;
    const bool disagreed = other.ended && other.ended->kind == Failure::Kind::kMismatch && other.ended_ns >= since_ns;
    if (!other.ended || disagreed) return &other;
  }
  return nullptr;
}

}  // namespace procgroup
