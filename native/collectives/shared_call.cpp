#include "collectives/shared_call.hpp"

#include <exception>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/exposure.hpp"
#include "collectives/shared_schedule.hpp"
#include "collectives/small_call.hpp"

namespace procgroup {
namespace {

// When some ranks are known to disagree, how long to wait for the rest before saying so without them.
constexpr int64_t kMismatchWaitNs = 1'000'000'000;

}  // namespace

SharedCall::SharedCall(SharedState& state, const Request& request)
    : state_(state), request_(request), run_(state, request), fingerprint_(request.descriptor.fingerprint()) {}

// Memory may be refused, and what a peer wrote may lead out of its arena: both end the call, on whatever thread.
Progress SharedCall::advance() {
  try {
    return advance_phase();
  } catch (const std::exception& error) {
    give_up({.kind = Failure::Kind::kBroken, .reason = std::string("it cannot go on: ") + error.what()});
    return Progress::kDone;
  }
}

Progress SharedCall::advance_phase() {
  switch (phase_) {
    case Phase::kAnnounce:
      announce();
      phase_ = Phase::kAgree;
      [[fallthrough]];
    case Phase::kAgree:
      if (!agree()) return Progress::kWaiting;
      if (is_completed()) return Progress::kDone;
      if (is_small()) {
        finish_at_once();
        return Progress::kDone;
      }
      if (!scheduled_) {
        make_schedule(state_, request_);
        take_slots();
      }
      phase_ = Phase::kExecute;
      [[fallthrough]];
    case Phase::kExecute:
      return execute();
  }
  return Progress::kDone;
}

Progress SharedCall::execute() {
  const size_t before = run_.steps_done();
  if (!run_.advance()) {
    if (run_.failure()) {
      give_up(*run_.failure());
      return Progress::kDone;
    }
    return run_.steps_done() == before ? Progress::kWaiting : Progress::kMoved;
  }
  state_.progress += state_.schedule.published;
  state_.chunks += state_.schedule.chunks;
  conclude();
  return Progress::kDone;
}

void SharedCall::give_up(Failure failure) {
  end_exposure(state_, request_.descriptor.sequence);
  failure.wrote = phase_ == Phase::kExecute && !request_.after;
  fail(std::move(failure));
}

// What is small must be known from what all ranks agree upon.
bool SharedCall::is_small() const {
  const Descriptor& call = request_.descriptor;
  if (call.op == OpKind::kAllToAll) return all_to_all_is_small(state_, call);
  return largest_contribution(call, state_.size()) <= state_.layout.small_bytes;
}

void SharedCall::announce() {
  const Descriptor& call = request_.descriptor;
  const size_t given = largest_contribution(call, state_.size());
  // Large calls have a buffer table there.
  state_.staging->begin(call.sequence, given > kInlinePayload || call.op == OpKind::kAllToAll);
  state_.copied_in = {.before = state_.copied_in.now};
  if (call.op == OpKind::kAllToAll)
    copy_in_all_to_all(state_, request_);
  else if (given <= state_.layout.small_bytes)
    copy_in_small(state_, request_);
  else
    expose_and_copy_in();
  GroupMemoryView& mine = state_.mine();
  Announcement& announcement = mine.announcement(call.sequence);
  mine.descriptor(call.sequence) = call;
  announcement.fingerprint = fingerprint_;
  announcement.sequence.store(call.sequence, std::memory_order_seq_cst);
  state_.wake_peers();
}

void SharedCall::expose_and_copy_in() {
  show_arrays(state_, request_, true);
  scheduled_ = make_schedule_early(state_, request_);
  if (!scheduled_) return;
  take_slots();
  run_.copy_in();
}

void SharedCall::take_slots() {
  if (state_.schedule.chunks != 0) state_.staging->take_slots(request_.descriptor.sequence);
}

bool SharedCall::agree() {
  const uint64_t sequence = request_.descriptor.sequence;
  for (; next_ < state_.size(); ++next_) {
    const Announcement& announcement = state_.member(next_).announcement(sequence);
    if (announcement.sequence.load(std::memory_order_seq_cst) != sequence) break;
    if (announcement.fingerprint != fingerprint_) mismatch_ = true;
  }
  if (!mismatch_) {
    if (next_ != state_.size()) return false;
    if (request_.descriptor.op == OpKind::kAllToAll) compare_pairs();
    return true;
  }
  if (mismatch_since_ns_ == 0) mismatch_since_ns_ = now_ns();
  if (next_ < state_.size() && now_ns() - mismatch_since_ns_ < kMismatchWaitNs) return false;
  report_mismatch();
  return true;
}

void SharedCall::report_mismatch() {
  Failure failure{.kind = Failure::Kind::kMismatch};
  const uint64_t sequence = request_.descriptor.sequence;
  for (int rank = 0; rank < state_.size(); ++rank) {
    const bool arrived = state_.has_announced(rank, sequence);
    const Descriptor& shown = state_.member(rank).descriptor(sequence);
    failure.calls.push_back(arrived ? Descriptor::copied_from(&shown).describe(state_.global_ranks) : "nothing yet");
  }
  give_up(std::move(failure));
}

void SharedCall::compare_pairs() {
  const Descriptor& call = request_.descriptor;
  const auto sheet = [&](int rank) { return BufferTable(state_.member(rank).small(call.sequence), state_.size()); };
  // This rank's own counts are those of its arrays, whatever became of its buffer table, which the others can write.
  const auto given = [&](int from, int to) -> uint64_t {
    return from == state_.rank ? request_.inputs[static_cast<size_t>(to)].count : sheet(from).input(to).count;
  };
  const auto expected = [&](int from, int to) -> uint64_t {
    return to == state_.rank ? request_.outputs[static_cast<size_t>(from)].count : sheet(to).output(from).count;
  };
  if (auto fault = state_.counts.read(call, state_.size(), given, expected, state_.global_ranks))
    give_up(std::move(*fault));
}

void SharedCall::finish_at_once() {
  if (request_.descriptor.op == OpKind::kAllToAll)
    finish_small_all_to_all(state_, request_);
  else
    finish_small(state_, request_);
  conclude();
}

void SharedCall::conclude() {
  state_.staging->end(request_.descriptor.sequence);
  finish();
}

std::vector<int> SharedCall::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < state_.size(); ++rank) {
    const bool awaited =
        phase_ == Phase::kExecute ? run_.awaits(rank) : !state_.has_announced(rank, request_.descriptor.sequence);
    if (awaited) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace procgroup
