#include "messages/wait_edge_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace procgroup {
namespace {

constexpr MessageKey kKey{0, uint64_t{1} << 63 | 1};  // no group has the identity 0

enum class Kind : uint32_t { kSubscribe, kWait, kWaitEnded, kVerdict, kCallsQuery, kCalls, kSourceLine };

bool is_cycle(const std::vector<WaitEdge>& waits) {
  for (size_t index = 0; index < waits.size(); ++index)
    if (waits[index].next != waits[(index + 1) % waits.size()].rank) return false;
  return waits.size() > 1;
}

}  // namespace

// A message is a header, and then `waits` waits; in a kCalls and a kSourceLine, `waits` is the size of the text that
// follows. A kCallsQuery, a kCalls and a kSourceLine have their group in `confirmed`.
enum class Replay : uint64_t { kUnknown, kNone, kRuns };
struct WaitEdgeExchange::Header {
  Kind kind;
  uint32_t waits;
  uint64_t confirmed;
  uint64_t sequence = 0;  // in a kSourceLine: of the collective; in a kCallsQuery and a kCalls: of the captured call
  Replay replay = Replay::kUnknown;  // in a kCalls: of the captured call
};
struct WaitEdgeExchange::Wait {
  int32_t rank;
  int32_t next;
  uint64_t op;
  uint64_t number;
  uint64_t epoch;
  char line[WaitEdgeBoard::kLineBytes];  // zeros after its last character

  static Wait of(const WaitEdge& wait) {
    Wait sent{wait.rank, wait.next, static_cast<uint64_t>(wait.op), wait.number, wait.epoch, {}};
    std::memcpy(sent.line, wait.line.data(), std::min(wait.line.size(), sizeof sent.line));
    return sent;
  }
  bool is_possible(int world_size) const {
    const auto is_rank = [=](int one) { return one >= 0 && one < world_size; };
    return is_rank(rank) && is_rank(next) && rank != next && op <= static_cast<uint64_t>(kMakesGroup) && epoch % 2 == 0;
  }
  WaitEdge shown() const {
    return {.rank = rank,
            .next = next,
            .op = static_cast<OpKind>(op),
            .number = number,
            .epoch = epoch,
            .line = readable(line, sizeof line)};
  }
};

WaitEdgeExchange::WaitEdgeExchange(Messages& messages, int rank, int world_size)
    : messages_(messages), rank_(rank), copies_(static_cast<size_t>(world_size)) {
  messages_.listen(kKey, [this](int peer, const std::vector<std::byte>& message) { take(peer, message); });
}

WaitEdgeExchange::~WaitEdgeExchange() { messages_.listen(kKey, nullptr); }

const WaitEdgeBoard* WaitEdgeExchange::add(int peer) {
  std::unique_ptr<Copy>& copy = copies_[static_cast<size_t>(peer)];
  copy = std::make_unique<Copy>();
  return &copy->board;
}

void WaitEdgeExchange::subscribe(int peer) {
  Copy* const copy = copy_of(peer);
  if (copy == nullptr || copy->subscribed) return;
  copy->subscribed = true;
  post(peer, {.kind = Kind::kSubscribe, .waits = 0, .confirmed = 0}, {});
}

void WaitEdgeExchange::publish(const WaitEdgeBoard& own) {
  const std::optional<WaitEdge> wait = own.wait(rank_);
  for (int peer = 0; peer < static_cast<int>(copies_.size()); ++peer) {
    Copy* const copy = copy_of(peer);
    if (copy == nullptr) continue;
    if (!wait) copy->subscribed = false;
    if (!copy->subscriber) continue;
    if (!wait) {
      if (copy->sent_epoch == 0) continue;
      copy->subscriber = false;  // it will subscribe again
      copy->sent_epoch = 0;
      post(peer, {.kind = Kind::kWaitEnded, .waits = 0, .confirmed = 0}, {});
    } else if (copy->sent_epoch != wait->epoch || copy->sent_confirmed != own.confirmed()) {
      copy->sent_epoch = wait->epoch;
      copy->sent_confirmed = own.confirmed();
      const Wait sent = Wait::of(*wait);
      post(peer, {.kind = Kind::kWait, .waits = 1, .confirmed = copy->sent_confirmed},
           std::as_bytes(std::span(&sent, 1)));
    }
  }
}

void WaitEdgeExchange::announce(const std::vector<WaitEdge>& cycle) {
  std::vector<Wait> waits;
  for (const WaitEdge& wait : cycle) waits.push_back(Wait::of(wait));
  const Header header{.kind = Kind::kVerdict, .waits = static_cast<uint32_t>(waits.size()), .confirmed = 0};
  for (const WaitEdge& wait : cycle)
    if (copy_of(wait.rank) != nullptr) post(wait.rank, header, std::as_bytes(std::span(waits)));
}

void WaitEdgeExchange::query_calls(int peer, uint64_t group, uint64_t captured) {
  Copy* const copy = copy_of(peer);
  if (copy == nullptr) return;
  const int64_t now = now_ns();
  const bool is_same = copy->queried_group == group && copy->queried_captured == captured;
  if (copy->queried_ns != 0 && is_same && now - copy->queried_ns < kAgainNs) return;
  copy->queried_ns = now;
  copy->queried_group = group;
  copy->queried_captured = captured;
  copy->answered = false;
  post(peer, {.kind = Kind::kCallsQuery, .waits = 0, .confirmed = group, .sequence = captured}, {});
}

bool WaitEdgeExchange::has_answered(int peer) const {
  const Copy* const copy = copy_of(peer);
  return copy != nullptr && copy->answered;
}

std::optional<bool> WaitEdgeExchange::runs_replay(int peer) const {
  return has_answered(peer) ? copy_of(peer)->runs_replay : std::nullopt;
}

std::string WaitEdgeExchange::calls(int peer) const {
  const Copy* const copy = copy_of(peer);
  if (copy == nullptr || copy->calls_group != copy->queried_group) return "";
  return copy->answered || now_ns() - copy->calls_ns < kFreshNs ? copy->calls : "";
}

void WaitEdgeExchange::answer(const std::function<Answer(uint64_t group, uint64_t captured)>& describe) {
  const int64_t now = now_ns();
  for (int peer = 0; peer < static_cast<int>(copies_.size()); ++peer) {
    Copy* const copy = copy_of(peer);
    if (copy == nullptr || !copy->query || now - copy->answered_ns < kAnswerNs) continue;
    const auto [group, captured] = *std::exchange(copy->query, std::nullopt);
    --queries_;
    copy->answered_ns = now;
    const auto [calls, runs] = describe(group, captured);
    const Replay replay = !runs ? Replay::kUnknown : *runs ? Replay::kRuns : Replay::kNone;
    post_text(peer, {.kind = Kind::kCalls, .waits = 0, .confirmed = group, .sequence = captured, .replay = replay},
              calls);
  }
}

void WaitEdgeExchange::post_source_line(int peer, uint64_t group, uint64_t sequence, const std::string& line) {
  if (copy_of(peer) == nullptr) return;
  post_text(peer, {.kind = Kind::kSourceLine, .waits = 0, .confirmed = group, .sequence = sequence}, line);
}

std::string WaitEdgeExchange::source_line(int peer, uint64_t group, uint64_t sequence) const {
  const Copy* const copy = copy_of(peer);
  return copy != nullptr && copy->line_group == group && copy->line_sequence == sequence ? copy->line : "";
}

void WaitEdgeExchange::post_text(int peer, Header header, const std::string& text) {
  header.waits = static_cast<uint32_t>(std::min(text.size(), kTextBytes));
  post(peer, header, std::as_bytes(std::span(text)).first(header.waits));
}

void WaitEdgeExchange::post(int peer, const Header& header, std::span<const std::byte> content) {
  const auto head = std::as_bytes(std::span(&header, 1));
  std::vector<std::byte> message(head.begin(), head.end());
  message.insert(message.end(), content.begin(), content.end());
  messages_.post(peer, kKey, std::move(message));
}

void WaitEdgeExchange::take(int peer, const std::vector<std::byte>& message) {
  Copy* const copy = copy_of(peer);
  Header header;
  if (copy == nullptr || message.size() < sizeof header) return;
  std::memcpy(&header, message.data(), sizeof header);
  if (header.kind == Kind::kCalls || header.kind == Kind::kSourceLine) return take_text(*copy, header, message);
  if (header.waits > WaitEdgeBoard::kMembers || message.size() != sizeof header + header.waits * sizeof(Wait)) return;
  std::vector<WaitEdge> waits;
  for (size_t index = 0; index < header.waits; ++index) {
    Wait wait;
    std::memcpy(&wait, message.data() + sizeof header + index * sizeof wait, sizeof wait);
    if (!wait.is_possible(static_cast<int>(copies_.size()))) return;
    waits.push_back(wait.shown());
  }
  switch (header.kind) {
    case Kind::kSubscribe:
      copy->subscriber = true;
      copy->sent_epoch = 0;
      return;
    case Kind::kWait:
      if (waits.size() == 1 && waits[0].rank == peer) copy->board.copy(waits[0], header.confirmed);
      return;
    case Kind::kWaitEnded:
      copy->subscribed = false;
      copy->board.hide();
      return;
    case Kind::kVerdict:
      if (is_cycle(waits)) copy->board.announce(waits);
      return;
    case Kind::kCallsQuery:
      if (!copy->query) ++queries_;
      copy->query = {header.confirmed, header.sequence};
      return;
    case Kind::kCalls:
    case Kind::kSourceLine:
      return;
  }
}

void WaitEdgeExchange::take_text(Copy& copy, const Header& header, const std::vector<std::byte>& message) {
  if (header.waits > kTextBytes || message.size() != sizeof header + header.waits) return;
  std::string text = readable(reinterpret_cast<const char*>(message.data() + sizeof header), header.waits);
  if (header.kind == Kind::kCalls) {
    // Else it is the answer to the query before.
    copy.answered = header.confirmed == copy.queried_group && header.sequence == copy.queried_captured;
    copy.runs_replay.reset();
    if (header.replay == Replay::kRuns || header.replay == Replay::kNone)
      copy.runs_replay = header.replay == Replay::kRuns;
    copy.calls = std::move(text);
    copy.calls_group = header.confirmed;
    copy.calls_ns = now_ns();
    return;
  }
  copy.line_group = header.confirmed;
  copy.line_sequence = header.sequence;
  copy.line = std::move(text);
}

}  // namespace procgroup
