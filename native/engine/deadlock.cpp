#include "engine/deadlock.hpp"

#include <algorithm>
#include <utility>

#include "base/clock.hpp"

namespace procgroup {
namespace {

bool same(const std::vector<ShownWait>& left, const std::vector<ShownWait>& right) {
  return std::ranges::equal(left, right, [](const ShownWait& one, const ShownWait& other) {
    return one.rank == other.rank && one.epoch == other.epoch;
  });
}

// In the same words on every member: beginning with the lowest rank.
Failure failure_of(std::vector<ShownWait> circle) {
  std::ranges::rotate(circle, std::ranges::min_element(circle, {}, &ShownWait::rank));
  Failure failure{.kind = Failure::Kind::kDeadlock};
  for (const ShownWait& wait : circle) {
    failure.missing.push_back(wait.rank);
    failure.calls.push_back(wait.describe());
  }
  return failure;
}

}  // namespace

std::optional<Failure> DeadlockWatch::examine(const std::function<std::optional<Awaited>()>& awaited,
                                              const std::function<bool()>& alone) {
  if (!is_suspicious()) return std::nullopt;
  if (shown_)
    if (std::optional<Failure> deadlock = told_since(sight_.own_board()->epoch())) return deadlock;
  std::optional<Failure> deadlock = look(awaited, alone);
  sight_.publish();
  return deadlock;
}

std::optional<Failure> DeadlockWatch::look(const std::function<std::optional<Awaited>()>& awaited,
                                           const std::function<bool()>& alone) {
  const bool may_be_one = sight_.is_idle() && alone();
  if (may_be_one && !sight_.is_quiet()) {
    seen_.clear();
    return std::nullopt;
  }
  const std::optional<Awaited> now = may_be_one ? awaited() : std::nullopt;
  if (!now || now->ranks.empty()) {
    hide();
    return std::nullopt;
  }
  // Found while this wait showed another rank in between: who found it has ended its own wait, and will not look again.
  if (first_epoch_ != 0)
    if (std::optional<Failure> deadlock = told_since(first_epoch_, &now->ranks)) return deadlock;
  show(choose(*now));
  const WaitBoard* next = sight_.board(shown_->next);
  const std::optional<ShownWait> theirs = next == nullptr ? std::nullopt : next->wait(shown_->next);
  // What they sent before they showed their wait is there by now: is there really nothing?
  const std::optional<Awaited> still = theirs && sight_.is_quiet() ? awaited() : std::nullopt;
  if (!still || std::ranges::find(still->ranks, shown_->next) == still->ranks.end()) {
    seen_.clear();
    return std::nullopt;
  }
  sight_.own_board()->confirm(theirs->epoch);
  std::vector<ShownWait> circle = circle_from(sight_.rank());
  const bool found = !circle.empty() && same(circle, seen_) && stands(circle);
  seen_ = std::move(circle);
  if (!found) return std::nullopt;
  sight_.own_board()->announce(seen_);
  sight_.announce(seen_);
  return failure_of(seen_);
}

bool DeadlockWatch::is_suspicious() {
  if (seconds_ <= kShortSeconds || sight_.own_board() == nullptr) return false;
  const int64_t now = now_ns();
  if (since_ns_ == 0) since_ns_ = now;
  return now - since_ns_ >= suspicious_ns_;
}

// A collective may await several ranks, each of which it needs: the one that closes a circle, if one does.
ShownWait DeadlockWatch::choose(const Awaited& awaited) const {
  ShownWait wait{.rank = sight_.rank(), .next = awaited.ranks.front(), .op = awaited.op, .number = awaited.number};
  for (const int rank : awaited.ranks) {
    const std::vector<ShownWait> path = circle_from(rank);
    const bool leads_here = std::ranges::any_of(path, [&](const ShownWait& one) { return one.next == wait.rank; });
    if (leads_here) wait.next = rank;
  }
  return wait;
}

void DeadlockWatch::show(const ShownWait& wait) {
  if (shown_ && shown_->next == wait.next) return;
  shown_ = wait;
  seen_.clear();
  sight_.own_board()->show(wait);
  if (first_epoch_ == 0) first_epoch_ = sight_.own_board()->epoch();
}

void DeadlockWatch::hide() {
  if (!shown_) return;
  shown_.reset();
  seen_.clear();
  sight_.own_board()->hide();
  sight_.publish();
}

// The waits from this rank on, until one is awaited that is among them (a circle through `rank`, when it is `rank`
// itself), or that shows nothing.
std::vector<ShownWait> DeadlockWatch::circle_from(int rank) const {
  std::vector<ShownWait> path;
  for (int at = rank; path.size() < WaitBoard::kMembers;) {
    if (at < 0 || at >= sight_.world_size()) return {};
    sight_.ask(at);
    const WaitBoard* board = sight_.board(at);
    const std::optional<ShownWait> wait = board == nullptr ? std::nullopt : board->wait(at);
    if (!wait) return rank == sight_.rank() ? std::vector<ShownWait>{} : path;
    path.push_back(*wait);
    at = wait->next;
    if (at == rank) return path;
    if (std::ranges::find(path, at, &ShownWait::rank) != path.end())
      return rank == sight_.rank() ? std::vector<ShownWait>{} : path;
  }
  return {};
}

bool DeadlockWatch::stands(const std::vector<ShownWait>& circle) const {
  for (size_t index = 0; index < circle.size(); ++index) {
    const uint64_t next_epoch = circle[(index + 1) % circle.size()].epoch;
    if (sight_.board(circle[index].rank)->confirmed() != next_epoch) return false;
  }
  return std::ranges::all_of(circle,
                             [&](const ShownWait& wait) { return sight_.board(wait.rank)->epoch() == wait.epoch; });
}

std::optional<Failure> DeadlockWatch::told() const {
  return first_epoch_ == 0 ? std::nullopt : told_since(first_epoch_);
}

std::optional<Failure> DeadlockWatch::told_since(uint64_t epoch, const std::vector<int>* awaited) const {
  const auto mine = [&](const ShownWait& wait) {
    return wait.rank == sight_.rank() && wait.epoch >= epoch &&
           (awaited == nullptr || std::ranges::find(*awaited, wait.next) != awaited->end());
  };
  for (int rank = 0; rank < sight_.world_size(); ++rank) {
    const WaitBoard* board = sight_.board(rank);
    if (board == nullptr) continue;
    const std::vector<ShownWait> circle = board->verdict();
    if (std::ranges::any_of(circle, mine)) return failure_of(circle);
  }
  return std::nullopt;
}

}  // namespace procgroup
