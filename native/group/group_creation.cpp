#include "group/group_creation.hpp"

#include <algorithm>
#include <utility>

namespace procgroup {
namespace {

// How long two ranks must have waited for each other in different groups before that is an error. Threads of a
// program that make groups concurrently may meet with a delay.
constexpr int64_t kConflictNs = 1'000'000'000;

// The failure of a rank that waits for `peer`, which has ended the group: if that was a timeout for which other ranks
// are missing, the same timeout.
Failure failure_from(int peer, const Failure& failure, int rank) {
  const auto* timeout = failure.as<Timeout>();
  if (timeout != nullptr && std::ranges::find(timeout->missing, rank) == timeout->missing.end()) return failure;
  return as_seen_by(rank, peer, failure, nullptr);
}

}  // namespace

GroupCreation::GroupCreation(Engine& engine, uint64_t identity, std::vector<int> members, uint64_t memory,
                             std::string call)
    : engine_(engine), identity_(identity), members_(std::move(members)), memory_(memory), call_(std::move(call)) {}

GroupCreation::~GroupCreation() {
  if (began_ns_ == 0 || engine_.forked()) return;
  const std::lock_guard lock(engine_.messages_mutex());
  expect_members(false);
}

// What a member sent before it makes the group may be more than is kept: it is read all the same.
void GroupCreation::expect_members(bool begins) {
  for (const int member : members_)
    if (member != engine_.rank()) engine_.messages().expect(member, begins);
}

Progress GroupCreation::advance() {
  if (is_completed()) return Progress::kDone;
  const std::lock_guard lock(engine_.messages_mutex());
  if (began_ns_ == 0) {
    began_ns_ = now_ns();
    engine_.handshakes().open(identity_, members_, memory_, call_);
    expect_members(true);
  }
  const bool moved = engine_.pump();
  engine_.handshakes().receive_arrived();
  if (look()) return Progress::kDone;
  return moved ? Progress::kMoved : Progress::kWaiting;
}

bool GroupCreation::look() {
  for (const int member : members_) {
    const GroupHandshake* theirs = engine_.handshakes().received(member, identity_);
    if (theirs == nullptr || !theirs->ended) continue;
    end_with(failure_from(member, *theirs->ended, engine_.rank()));
    return true;
  }
  const std::vector<int> silent = unreceived();
  if (!silent.empty()) return find_conflict(silent);
  for (const int member : members_)
    offsets_.push_back(member == engine_.rank() ? memory_ : engine_.handshakes().received(member, identity_)->memory);
  finish();
  return true;
}

std::vector<int> GroupCreation::unreceived() const {
  std::vector<int> silent;
  for (const int member : members_)
    if (member != engine_.rank() && engine_.handshakes().received(member, identity_) == nullptr)
      silent.push_back(member);
  return silent;
}

bool GroupCreation::find_conflict(const std::vector<int>& silent) {
  Mismatch failure;
  failure.calls.resize(static_cast<size_t>(engine_.world_size()));
  bool answered = false;
  refused_.clear();
  for (const int member : silent) {
    const GroupHandshake* other = engine_.handshakes().conflicting(member, began_ns_);
    if (other == nullptr) continue;
    refused_.push_back(other->identity);
    answered = answered || other->ended;
    failure.calls[static_cast<size_t>(member)] = other->call;
  }
  if (refused_.empty()) return conflict_since_ns_ = 0, false;
  if (conflict_since_ns_ == 0) conflict_since_ns_ = now_ns();
  if (!answered && now_ns() - conflict_since_ns_ < kConflictNs) return false;
  for (size_t rank = 0; rank < failure.calls.size(); ++rank)
    if (!failure.calls[rank].empty())
      failure.reason += "rank " + std::to_string(rank) + " calls " + failure.calls[rank] + ", ";
  failure.reason += "rank " + std::to_string(engine_.rank()) + " calls " + call_;
  failure.calls[static_cast<size_t>(engine_.rank())] = call_;
  for (const int member : silent)
    if (const GroupHandshake* other = engine_.handshakes().conflicting(member, began_ns_))
      engine_.handshakes().forget(member, other->identity);
  end_with(std::move(failure));
  return true;
}

void GroupCreation::end_with(Failure failure) {
  engine_.handshakes().close(identity_, &failure, true);
  fail(std::move(failure));
}

void GroupCreation::give_up(Failure failure) {
  const std::lock_guard lock(engine_.messages_mutex());
  if (!is_completed()) end_with(std::move(failure));
}

std::vector<int> GroupCreation::missing() const {
  const std::lock_guard lock(engine_.messages_mutex());
  return unreceived();
}

std::optional<Awaited> GroupCreation::awaited() const {
  const std::lock_guard lock(engine_.messages_mutex());
  engine_.handshakes().receive_arrived();
  Awaited awaited{.op = kMakesGroup, .number = 0, .ranks = unreceived()};
  const bool disagrees = std::ranges::any_of(
      awaited.ranks, [&](int member) { return engine_.handshakes().conflicting(member, began_ns_) != nullptr; });
  return disagrees ? std::nullopt : std::optional(std::move(awaited));
}

std::optional<Failure> GroupCreation::examine() const {
  if (engine_.aborted()) return Aborted{};
  for (const int member : missing()) {
    if (std::optional<MemberEnd> end = engine_.end_of(member); end && end->how == MemberEnd::How::kRaised)
      return std::move(end->why);
    const std::lock_guard lock(engine_.messages_mutex());
    const Failure* silenced = engine_.handshakes().silenced(member);
    if (silenced == nullptr) continue;
    Failure failure = *silenced;
    if (auto* lost = failure.as<Lost>()) engine_.identify(*lost, member);
    return failure;
  }
  return std::nullopt;
}

}  // namespace procgroup
