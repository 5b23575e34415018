#include "messages/wait_edge_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace procgroup {
namespace {

constexpr MessageKey kKey{0, uint64_t{1} << 63 | 1};  // no group has the identity 0

enum class Kind : uint32_t { kAsks, kShows, kOver, kVerdict, kAsksCalls, kCalls };

bool is_cycle(const std::vector<WaitEdge>& waits) {
  for (size_t index = 0; index < waits.size(); ++index)
    if (waits[index].next != waits[(index + 1) % waits.size()].rank) return false;
  return waits.size() > 1;
}

}  // namespace

// As they travel: a head, and then `waits` waits; of kCalls as many bytes of text. kAsksCalls has its group in
// `confirmed`.
struct WaitEdgeExchange::Head {
  Kind kind;
  uint32_t waits;
  uint64_t confirmed;
};
struct WaitEdgeExchange::Wait {
  int32_t rank;
  int32_t next;
  uint64_t op;
  uint64_t number;
  uint64_t epoch;

  static Wait of(const WaitEdge& wait) {
    return {wait.rank, wait.next, static_cast<uint64_t>(wait.op), wait.number, wait.epoch};
  }
  bool is_possible(int world_size) const {
    const auto is_rank = [=](int one) { return one >= 0 && one < world_size; };
    return is_rank(rank) && is_rank(next) && rank != next && op < kOperations && epoch % 2 == 0;
  }
  WaitEdge shown() const {
    return {.rank = rank, .next = next, .op = static_cast<OpKind>(op), .number = number, .epoch = epoch};
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

void WaitEdgeExchange::ask(int peer) {
  Copy* copy = copies_[static_cast<size_t>(peer)].get();
  if (copy == nullptr || copy->asked) return;
  copy->asked = true;
  post(peer, {.kind = Kind::kAsks, .waits = 0, .confirmed = 0}, {});
}

void WaitEdgeExchange::publish(const WaitEdgeBoard& own) {
  const std::optional<WaitEdge> wait = own.wait(rank_);
  for (int peer = 0; peer < static_cast<int>(copies_.size()); ++peer) {
    Copy* copy = copies_[static_cast<size_t>(peer)].get();
    if (copy == nullptr) continue;
    if (!wait) copy->asked = false;
    if (!copy->asks) continue;
    if (!wait) {
      if (copy->told_epoch == 0) continue;
      copy->asks = false;  // it will ask again
      copy->told_epoch = 0;
      post(peer, {.kind = Kind::kOver, .waits = 0, .confirmed = 0}, {});
    } else if (copy->told_epoch != wait->epoch || copy->told_confirmed != own.confirmed()) {
      copy->told_epoch = wait->epoch;
      copy->told_confirmed = own.confirmed();
      post(peer, {.kind = Kind::kShows, .waits = 1, .confirmed = copy->told_confirmed}, {Wait::of(*wait)});
    }
  }
}

void WaitEdgeExchange::announce(const std::vector<WaitEdge>& cycle) {
  std::vector<Wait> waits;
  for (const WaitEdge& wait : cycle) waits.push_back(Wait::of(wait));
  const Head head{.kind = Kind::kVerdict, .waits = static_cast<uint32_t>(waits.size()), .confirmed = 0};
  for (const WaitEdge& wait : cycle)
    if (copies_[static_cast<size_t>(wait.rank)]) post(wait.rank, head, waits);
}

void WaitEdgeExchange::ask_calls(int peer, uint64_t group) {
  Copy* copy = copies_[static_cast<size_t>(peer)].get();
  if (copy == nullptr) return;
  const int64_t now = now_ns();
  if (copy->asked_ns != 0 && copy->asked_group == group && now - copy->asked_ns < kFreshNs) return;
  copy->asked_ns = now;
  copy->asked_group = group;
  copy->calls.clear();
  post(peer, {.kind = Kind::kAsksCalls, .waits = 0, .confirmed = group}, {});
}

const std::string& WaitEdgeExchange::calls(int peer) const {
  static const std::string kNone;
  const Copy* copy = copies_[static_cast<size_t>(peer)].get();
  return copy == nullptr ? kNone : copy->calls;
}

void WaitEdgeExchange::answer(const std::function<std::string(uint64_t group)>& describe) {
  const int64_t now = now_ns();
  for (int peer = 0; peer < static_cast<int>(copies_.size()); ++peer) {
    Copy* copy = copies_[static_cast<size_t>(peer)].get();
    if (copy == nullptr || !copy->question || now - copy->answered_ns < kAnswerNs) continue;
    const std::string text = describe(*std::exchange(copy->question, std::nullopt)).substr(0, kCallsBytes);
    --questions_;
    copy->answered_ns = now;
    const Head head{.kind = Kind::kCalls, .waits = static_cast<uint32_t>(text.size()), .confirmed = 0};
    std::vector<std::byte> message(sizeof head + text.size());
    std::memcpy(message.data(), &head, sizeof head);
    std::memcpy(message.data() + sizeof head, text.data(), text.size());
    messages_.post(peer, kKey, std::move(message));
  }
}

void WaitEdgeExchange::post(int peer, const Head& head, const std::vector<Wait>& waits) {
  const size_t bytes = waits.size() * sizeof(Wait);
  std::vector<std::byte> message(sizeof head + bytes);
  std::memcpy(message.data(), &head, sizeof head);
  if (bytes > 0) std::memcpy(message.data() + sizeof head, waits.data(), bytes);
  messages_.post(peer, kKey, std::move(message));
}

void WaitEdgeExchange::take(int peer, const std::vector<std::byte>& message) {
  Copy* copy = copies_[static_cast<size_t>(peer)].get();
  Head head;
  if (copy == nullptr || message.size() < sizeof head) return;
  std::memcpy(&head, message.data(), sizeof head);
  if (head.kind == Kind::kCalls) return take_text(*copy, head, message);
  if (head.waits > WaitEdgeBoard::kMembers || message.size() != sizeof head + head.waits * sizeof(Wait)) return;
  std::vector<WaitEdge> waits;
  for (size_t index = 0; index < head.waits; ++index) {
    Wait wait;
    std::memcpy(&wait, message.data() + sizeof head + index * sizeof wait, sizeof wait);
    if (!wait.is_possible(static_cast<int>(copies_.size()))) return;
    waits.push_back(wait.shown());
  }
  switch (head.kind) {
    case Kind::kAsks:
      copy->asks = true;
      copy->told_epoch = 0;
      return;
    case Kind::kShows:
      if (waits.size() == 1 && waits[0].rank == peer) copy->board.copy(waits[0], head.confirmed);
      return;
    case Kind::kOver:
      copy->asked = false;
      copy->board.hide();
      return;
    case Kind::kVerdict:
      if (is_cycle(waits)) copy->board.announce(waits);
      return;
    case Kind::kAsksCalls:
      if (!copy->question) ++questions_;
      copy->question = head.confirmed;
      return;
    case Kind::kCalls:
      return;
  }
}

void WaitEdgeExchange::take_text(Copy& copy, const Head& head, const std::vector<std::byte>& message) {
  if (head.waits > kCallsBytes || message.size() != sizeof head + head.waits) return;
  copy.calls = readable(reinterpret_cast<const char*>(message.data() + sizeof head), head.waits);
}

}  // namespace procgroup
