#include "liveness/deadlock.hpp"

#include <algorithm>
#include <utility>

#include "base/clock.hpp"

namespace procgroup {
namespace {

bool same(const std::vector<WaitEdge>& left, const std::vector<WaitEdge>& right) {
  return std::ranges::equal(left, right, [](const WaitEdge& one, const WaitEdge& other) {
    return one.rank == other.rank && one.epoch == other.epoch;
  });
}

}  // namespace

std::optional<Failure> DeadlockDetector::examine(const std::function<std::optional<Awaited>()>& awaited,
                                                 const std::function<bool()>& alone) {
  if (!is_suspicious()) return std::nullopt;
  if (shown_)
    if (std::optional<Failure> deadlock = verdict_since(graph_.own_board()->epoch())) return deadlock;
  std::optional<Failure> deadlock = look(awaited, alone);
  graph_.publish();
  return deadlock;
}

std::optional<Failure> DeadlockDetector::look(const std::function<std::optional<Awaited>()>& awaited,
                                              const std::function<bool()>& alone) {
  const bool may_be_one = alone();
  if (may_be_one && !graph_.is_quiet()) {
    seen_.clear();
    return std::nullopt;
  }
  const std::optional<Awaited> now = may_be_one ? awaited() : std::nullopt;
  if (!now || now->ranks.empty()) {
    hide();
    return std::nullopt;
  }
  // Found while this wait showed another rank in between: the finder has ended its own wait, and will not check again.
  if (first_epoch_ != 0)
    if (std::optional<Failure> deadlock = verdict_since(first_epoch_, &now->ranks)) return deadlock;
  show(choose(*now), now->open_receives);
  const WaitEdgeBoard* next = graph_.board(shown_->next);
  const std::optional<WaitEdge> theirs = next == nullptr ? std::nullopt : next->wait(shown_->next);
  // Messages that they sent before they showed their wait have arrived by now: check that there are none.
  const std::optional<Awaited> still = theirs && graph_.is_quiet() ? awaited() : std::nullopt;
  const bool stands_still = still && still->open_receives == shown_open_receives_ &&
                            std::ranges::find(still->ranks, shown_->next) != still->ranks.end();
  if (!stands_still) {
    seen_.clear();
    return std::nullopt;
  }
  graph_.own_board()->confirm(theirs->epoch);
  std::vector<WaitEdge> cycle = cycle_from(graph_.rank());
  const bool found = !cycle.empty() && same(cycle, seen_) && stands(cycle);
  seen_ = std::move(cycle);
  if (!found) return std::nullopt;
  graph_.own_board()->announce(seen_);
  graph_.announce(seen_);
  return failure_of(seen_);
}

bool DeadlockDetector::is_suspicious() {
  if (seconds_ <= kShortSeconds || graph_.own_board() == nullptr) return false;
  const int64_t now = now_ns();
  if (since_ns_ == 0) since_ns_ = now;
  return now - since_ns_ >= suspicious_ns_;
}

// A collective may await several ranks, each of which it needs: the one that closes a cycle, if one does.
WaitEdge DeadlockDetector::choose(const Awaited& awaited) const {
  WaitEdge wait{.rank = graph_.rank(), .next = awaited.ranks.front(), .op = awaited.op, .number = awaited.number};
  for (const int rank : awaited.ranks) {
    const std::vector<WaitEdge> path = cycle_from(rank);
    const bool leads_here = std::ranges::any_of(path, [&](const WaitEdge& one) { return one.next == wait.rank; });
    if (leads_here) wait.next = rank;
  }
  return wait;
}

void DeadlockDetector::show(const WaitEdge& wait, size_t open_receives) {
  if (shown_ && shown_->next == wait.next && shown_open_receives_ == open_receives) return;
  shown_ = wait;
  shown_->line = graph_.line_of_wait(wait.op);
  shown_open_receives_ = open_receives;
  seen_.clear();
  graph_.own_board()->show(*shown_);
  if (first_epoch_ == 0) first_epoch_ = graph_.own_board()->epoch();
}

void DeadlockDetector::hide() {
  if (!shown_) return;
  shown_.reset();
  seen_.clear();
  graph_.own_board()->hide();
  graph_.publish();
}

// The waits from this rank on, until one is awaited that is among them (a cycle through `rank`, when it is `rank`
// itself), or that shows nothing.
std::vector<WaitEdge> DeadlockDetector::cycle_from(int rank) const {
  std::vector<WaitEdge> path;
  for (int at = rank; path.size() < WaitEdgeBoard::kMembers;) {
    if (at < 0 || at >= graph_.world_size()) return {};
    graph_.subscribe(at);
    const WaitEdgeBoard* board = graph_.board(at);
    const std::optional<WaitEdge> wait = board == nullptr ? std::nullopt : board->wait(at);
    if (!wait) return rank == graph_.rank() ? std::vector<WaitEdge>{} : path;
    path.push_back(*wait);
    at = wait->next;
    if (at == rank) return path;
    if (std::ranges::find(path, at, &WaitEdge::rank) != path.end())
      return rank == graph_.rank() ? std::vector<WaitEdge>{} : path;
  }
  return {};
}

bool DeadlockDetector::stands(const std::vector<WaitEdge>& cycle) const {
  for (size_t index = 0; index < cycle.size(); ++index) {
    const uint64_t next_epoch = cycle[(index + 1) % cycle.size()].epoch;
    if (graph_.board(cycle[index].rank)->confirmed() != next_epoch) return false;
  }
  return std::ranges::all_of(cycle,
                             [&](const WaitEdge& wait) { return graph_.board(wait.rank)->epoch() == wait.epoch; });
}

// In the same words on every member: beginning with the lowest rank.
Failure DeadlockDetector::failure_of(std::vector<WaitEdge> cycle) const {
  std::ranges::rotate(cycle, std::ranges::min_element(cycle, {}, &WaitEdge::rank));
  Deadlock deadlock;
  // Where one rank waits with a tag, that another one waits without may be the mistake.
  const bool with_tags = std::ranges::any_of(
      cycle, [](const WaitEdge& wait) { return wait.is_message() && wait.number != 0 && wait.number < kFirstOwnTag; });
  for (const WaitEdge& wait : cycle) {
    deadlock.reason += (deadlock.ranks.empty() ? "deadlock: rank " : ", rank ") + std::to_string(wait.rank) + " in ";
    deadlock.ranks.push_back(wait.rank);
    deadlock.reason += deadlock.calls.emplace_back(wait.describe(with_tags));
  }
  return deadlock;
}

std::optional<Failure> DeadlockDetector::announced() const {
  return first_epoch_ == 0 ? std::nullopt : verdict_since(first_epoch_);
}

std::optional<Failure> DeadlockDetector::verdict_since(uint64_t epoch, const std::vector<int>* awaited) const {
  const auto mine = [&](const WaitEdge& wait) {
    return wait.rank == graph_.rank() && wait.epoch >= epoch &&
           (awaited == nullptr || std::ranges::find(*awaited, wait.next) != awaited->end());
  };
  for (int rank = 0; rank < graph_.world_size(); ++rank) {
    const WaitEdgeBoard* board = graph_.board(rank);
    if (board == nullptr) continue;
    const std::vector<WaitEdge> cycle = board->verdict();
    if (std::ranges::any_of(cycle, mine)) return failure_of(cycle);
  }
  return std::nullopt;
}

}  // namespace procgroup
