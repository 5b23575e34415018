#include "collectives/collective_call.hpp"

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "base/diagnostics.hpp"
#include "collectives/buffer_table.hpp"
#include "collectives/choose_schedule.hpp"
#include "collectives/exposure.hpp"
#include "collectives/relay.hpp"
#include "collectives/small_call.hpp"
#include "dtype/partial.hpp"

namespace procgroup {
namespace {

// When some ranks are known to disagree, how long to wait for the rest before saying so without them.
constexpr int64_t kMismatchWaitNs = 1'000'000'000;

// Where a task is polled without a pause, a look at it takes less time than one at the connections.
constexpr uint32_t kLooksBetweenMessages = 16;

bool is_rooted(const CollectiveState& state, const Request& request) {
  const Descriptor& call = request.descriptor;
  const OperationRow& row = row_of(call.op);
  const bool has_root = row.givers == Ranks::kRoot || row.takers == Ranks::kRoot;
  return has_root && !request.task && !state.topology.spans_hosts() && is_small(state, call);
}

// What each rank called. The places are named where they differ.
Failure mismatch_of(const CollectiveState& state, uint64_t sequence, uint64_t running) {
  Mismatch mismatch;
  const Descriptor& own = state.member(state.rank).descriptor(sequence);
  std::vector<std::optional<Descriptor>> calls;
  bool places_differ = false;
  bool captures_differ = false;
  for (int rank = 0; rank < state.size(); ++rank) {
    std::optional<Descriptor>& call = calls.emplace_back();
    if (!state.has_announced(rank, sequence)) continue;
    call = Descriptor::copied_from(&state.member(rank).descriptor(sequence));
    places_differ = places_differ || call->external != own.external || call->on_device != own.on_device;
    captures_differ = captures_differ || call->captured != own.captured;
  }
  for (std::optional<Descriptor>& call : calls) {
    if (call && !places_differ) call->external = call->on_device = false;  // which goes without saying
    if (call && !captures_differ) call->captured = false;
    const char* const where = places_differ && call && !call->on_device ? " on the CPU" : "";
    mismatch.calls.push_back(call ? call->describe(state.global_ranks) + where : "nothing yet");
  }
  Failure failure(std::move(mismatch));
  failure.call = own;
  failure.wrote = sequence < running && takes(own.op, state.rank, own.root);  // that call has completed on this rank
  return failure;
}

}  // namespace

std::optional<Failure> unseen_mismatch(const CollectiveState& state, uint64_t last, uint64_t running) {
  if (!kDiagnoses || state.topology.spans_hosts()) return std::nullopt;
  for (uint64_t sequence = state.finished + 1; sequence <= last; ++sequence)
    for (int rank = 0; rank < state.size(); ++rank)
      if (state.has_announced(rank, sequence) && state.differs(rank, sequence))
        return mismatch_of(state, sequence, running);
  return std::nullopt;
}

CollectiveCall::CollectiveCall(CollectiveState& state, const Request& request)
    : state_(state),
      request_(request),
      executor_(state, request),
      is_rooted_(is_rooted(state, request)),
      fingerprint_(kDiagnoses ? request.descriptor.fingerprint() : 0) {}

CollectiveCall::~CollectiveCall() {
  if (!is_completed()) cancel_messages();
}

// Memory may be refused, and what a peer wrote may lead out of its arena: both end the call, on whatever thread.
Progress CollectiveCall::advance() try {
  if (phase_ == Phase::kAnnounce) {
    if (!may_announce()) return Progress::kWaiting;
    if (is_completed()) return Progress::kDone;
    next_ = 0;
    announce();
    phase_ = Phase::kAgree;
  }
  if (phase_ == Phase::kAgree) {
    if (const bool moved = relay(); !is_completed() && !agree()) return moved ? Progress::kMoved : Progress::kWaiting;
    if (is_completed()) return Progress::kDone;
    if (is_small_call()) {
      finish_small(state_, request_);
      conclude();
      return Progress::kDone;
    }
    if (!scheduled_ && !request_.descriptor.external) {
      make_schedule(state_, request_);
      take_slots();
    }
    phase_ = Phase::kExecute;
    // A waiter that is about to sleep looks again: it sleeps less long while a task runs.
    if (request_.descriptor.external && advance_task() == Progress::kWaiting) return Progress::kMoved;
    if (is_completed()) return Progress::kDone;
  }
  return request_.descriptor.external ? advance_task() : execute();
} catch (const std::exception& error) {
  give_up(Broken{std::string("it cannot go on: ") + error.what()});
  return Progress::kDone;
}

Progress CollectiveCall::execute() {
  const size_t before = executor_.done();
  if (!executor_.advance()) {
    if (executor_.failure()) {
      give_up(translated(*executor_.failure()));
      return Progress::kDone;
    }
    return executor_.done() == before ? Progress::kWaiting : Progress::kMoved;
  }
  state_.progress += state_.schedule.published;
  state_.chunks += state_.schedule.chunks;
  conclude();
  return Progress::kDone;
}

// The connections are still advanced: other ranks' failures come by them.
Progress CollectiveCall::advance_task() {
  if (confirmation_) return confirm();
  const bool is_polled = request_.task->longest_sleep_ns() == 0;
  if (state_.messages && (!is_polled || ++looks_ % kLooksBetweenMessages == 0)) {
    const std::lock_guard lock(state_.messages->mutex);
    state_.messages->pump();
  }
  if (!task_) request_.task->start(request_.descriptor.root, request_.descriptor.sequence);
  if (!task_ || task_ == Task::State::kPending) task_ = request_.task->test(awaited_);
  // MPICH reports success where it could not read the memory of a process that was killed. The engine finds the loss
  // within moments, and that ends the call.
  if (task_ == Task::State::kPending || has_dead_member()) return Progress::kWaiting;
  if (needs_confirmation()) {
    confirmation_.emplace(request_.descriptor.sequence);
    return confirm();
  }
  conclude();
  return Progress::kDone;
}

// A call without bytes has no result that could be wrong. Of a call on a device only the start is known here.
bool CollectiveCall::needs_confirmation() const {
  const Descriptor& call = request_.descriptor;
  const bool has_bytes = is_by_pair(call.op) || call.splits != 0 || call.bytes() != 0;
  return state_.messages && !call.on_device && has_bytes;
}

// Advance a polled task: those of other ranks may still need this rank.
Progress CollectiveCall::confirm() {
  if (request_.task->longest_sleep_ns() == 0) request_.task->test(awaited_);
  Progress progress;
  {
    const std::lock_guard lock(state_.messages->mutex);
    state_.messages->pump();
    progress = confirmation_->advance(*state_.messages);
  }
  if (progress != Progress::kDone) return progress;
  if (const Failure* failure = confirmation_->failure())
    give_up(translated(*failure));
  else
    conclude();
  return Progress::kDone;
}

bool CollectiveCall::has_dead_member() const {
  const Descriptor& call = request_.descriptor;
  // MPI may send the elements of several ranks at once, those of halves as float32. The blocks of an all_to_all are not
  // in its descriptor.
  const bool is_open = is_by_pair(call.op) || call.splits != 0;
  const size_t element = reduces(call.op) ? std::max(dtype_size(call.dtype), partial_size(call.dtype, call.reduce_op))
                                          : dtype_size(call.dtype);
  const size_t most = is_open ? SIZE_MAX : call.count * element * static_cast<size_t>(state_.size());
  return std::ranges::any_of(state_.peers, [=](const PeerMemory* peer) { return peer && peer->has_died(most); });
}

// Nothing wakes a rank when another backend has moved something.
int64_t CollectiveCall::longest_sleep_ns() const {
  if (!is_transferring()) return kAnySleepNs;
  const int64_t sleep_ns = request_.task->longest_sleep_ns();
  return sleep_ns == 0 || !confirmation_ ? sleep_ns : kAnySleepNs;
}

// A message that its receive refused is none that a correct peer sends.
Failure CollectiveCall::translated(Failure failure) const {
  if (const auto* mismatch = failure.as<Mismatch>(); mismatch != nullptr && mismatch->calls.empty())
    return Failed{.peer = mismatch->peer, .reason = "it sent data that this call does not expect: " + mismatch->reason};
  return failure;
}

void CollectiveCall::give_up(Failure failure) {
  if (is_completed()) return;
  // Another rank may have found what this one had not yet compared.
  const uint64_t running = request_.descriptor.sequence;
  if (const auto* failed = failure.as<Failed>(); failed != nullptr && failed->cause == FailureKind::kMismatch)
    if (auto mismatch = unseen_mismatch(state_, phase_ == Phase::kAnnounce ? running - 1 : running, running))
      failure = *std::move(mismatch);
  auto* timeout = failure.as<Timeout>();
  if (timeout != nullptr && is_transferring() && (confirmation_ || awaited_.empty())) {
    std::vector<int> stopped = state_.stopped_members ? state_.stopped_members() : std::vector<int>{};
    if (!stopped.empty()) timeout->missing = std::move(stopped);
    if (timeout->missing.empty()) timeout->reason = "its backend, which does not name the ranks that it waits for";
  }
  // Before the group keeps the failure, because an error that is raised from it says whether the array is unchanged.
  failure.wrote = failure.wrote || (phase_ == Phase::kExecute && !request_.after);
  if (request_.task) failure.wrote = failure.wrote || request_.task->may_have_written();
  if (state_.on_failure) state_.on_failure(failure, request_.descriptor);
  end_exposure(state_, request_.descriptor.sequence);
  executor_.cancel_transfers();
  cancel_messages();
  if (request_.task) request_.task->cancel();
  fail(std::move(failure));
}

void CollectiveCall::cancel_messages() {
  const bool is_relaying = state_.relay && phase_ == Phase::kAgree;
  if (!is_relaying && !confirmation_) return;
  const std::lock_guard lock(state_.messages->mutex);
  if (is_relaying) state_.relay->cancel(state_);
  if (confirmation_) confirmation_->cancel(*state_.messages);
}

// Which calls are small must be known from what all ranks agree upon.
bool is_small(const CollectiveState& state, const Descriptor& call) {
  if (call.external) return false;
  const size_t given = largest_contribution(call, state.size());
  if (given > state.layout.small_bytes) return false;
  if (!state.topology.spans_hosts()) return true;
  // A message between hosts has the elements of all ranks of a host, and should leave at once.
  const size_t ranks = state.topology.most_ranks_on_a_host();
  const size_t entry = call.bytes() * (has_input_blocks(call.op) ? ranks : 1) + 2 * sizeof(Descriptor);
  return call.bytes() <= state.messages->limits.small_bytes && ranks * entry <= kEagerBytes;
}

bool is_inline(const CollectiveState& state, const Descriptor& call) {
  return !is_by_pair(call.op) && largest_contribution(call, state.size()) <= kInlinePayload && is_small(state, call);
}

// For elements that do not fit beside the announcement, or for a buffer table, which ranks of one host read.
static bool has_small_areas(const CollectiveState& state, const Descriptor& call) {
  if (is_by_pair(call.op)) return true;
  if (call.external || largest_contribution(call, state.size()) <= kInlinePayload) return false;
  return !state.topology.spans_hosts() || is_small(state, call);
}

bool CollectiveCall::is_small_call() const {
  const Descriptor& call = request_.descriptor;
  if (call.external) return false;
  return is_by_pair(call.op) ? all_to_all_is_small(state_, call) : is_small(state_, call);
}

void CollectiveCall::announce() {
  const Descriptor& call = request_.descriptor;
  state_.staging->begin(call.sequence, has_small_areas(state_, call));
  state_.copied_in = {.before = state_.copied_in.now};
  if (call.external)
    announce_external();
  else if (is_by_pair(call.op))
    copy_in_all_to_all(state_, request_);
  else if (is_small(state_, call))
    copy_in_small(state_, request_);
  else
    expose_and_copy_in();
  GroupMemoryView& mine = state_.mine();
  Announcement& announcement = mine.announcement(call.sequence);
  if constexpr (kDiagnoses) mine.descriptor(call.sequence) = call;
  announcement.fingerprint = fingerprint_;
  announcement.sequence.store(call.sequence, std::memory_order_seq_cst);
  state_.wake_peers();
  if (!state_.relay) return;
  const std::lock_guard lock(state_.messages->mutex);
  state_.relay->start(state_, call.sequence);
}

bool CollectiveCall::relay() {
  if (!state_.topology.spans_hosts()) return false;
  if (!state_.relay) {
    attach_proxies(state_);
    return false;
  }
  if (state_.relay->is_completed()) return false;
  bool moved = false;
  {
    const std::lock_guard lock(state_.messages->mutex);
    moved = state_.messages->pump();
    moved = state_.relay->advance(state_, request_) || moved;
  }
  if (state_.relay->failure()) give_up(translated(*state_.relay->failure()));
  return moved;
}

// The sizes alone: the arrays may be on a device.
void CollectiveCall::announce_external() {
  if (is_by_pair(request_.descriptor.op)) show_arrays(state_, request_, false);
}

void CollectiveCall::expose_and_copy_in() {
  if (state_.topology.spans_hosts()) return;
  show_arrays(state_, request_, true);
  scheduled_ = make_schedule_early(state_, request_);
  if (!scheduled_) return;
  take_slots();
  executor_.copy_in();
}

void CollectiveCall::take_slots() {
  if (state_.schedule.chunks != 0) state_.staging->take_slots(request_.descriptor.sequence);
}

// Whether the announcement can take the place of an earlier one.
bool CollectiveCall::may_announce() {
  const uint64_t sequence = request_.descriptor.sequence;
  const uint64_t before = state_.finished;
  const bool has_finished = finish_earlier();
  if (is_completed()) return true;
  bool may = has_finished || (mismatch_ == 0 && is_inline(state_, request_.descriptor));
  if (may && !state_.topology.spans_hosts() && state_.finished_by_all + kAnnouncements < sequence) {
    state_.finished_by_all = state_.finished;
    for (int rank = 0; rank < state_.size(); ++rank)
      state_.finished_by_all = std::min(state_.finished_by_all, state_.finished_by(rank));
    may = state_.finished_by_all + kAnnouncements >= sequence;
  }
  // Who waits for this rank to finish earlier calls is woken by its announcement, or by this.
  if (!may && state_.finished != before) state_.show_finished();
  return may;
}

// Compare the calls of all ranks in earlier calls as far as all have come; true when none is left, or one differs.
bool CollectiveCall::finish_earlier() {
  if (state_.topology.spans_hosts()) return true;  // there every call waits for all ranks
  while (state_.finished + 1 < request_.descriptor.sequence) {
    const uint64_t earlier = state_.finished + 1;
    if (!compare(earlier, true)) return false;
    if (is_completed()) return true;
    next_ = 0;
    state_.finish(earlier);
  }
  return true;
}

bool CollectiveCall::agree() {
  const uint64_t sequence = request_.descriptor.sequence;
  if (!compare(sequence, !is_rooted_)) return false;
  if (is_completed()) return true;
  if (!is_rooted_ && !state_.topology.spans_hosts() && state_.finished + 1 < sequence) {
    state_.finished = sequence - 1;
    state_.show_finished();  // a rank that is in its next call already may wait for it
  }
  if (is_by_pair(request_.descriptor.op)) compare_pairs();
  return true;
}

// Whether the awaited ranks have announced a call; their earlier calls are compared with it. A call in which one
// differs fails, once all have come to that, or soon.
bool CollectiveCall::compare(uint64_t sequence, bool awaits_all) {
  for (; next_ < state_.size(); ++next_) {
    if (!awaits_all && !awaits(next_)) continue;
    if (!state_.has_announced(next_, sequence)) break;
    const uint64_t first = state_.find_difference(next_, sequence);
    if (kDiagnoses && first != 0 && (mismatch_ == 0 || first < mismatch_)) mismatch_ = first;
  }
  // A leader does not leave this phase before it has sent what the other hosts wait for.
  const bool is_known = next_ == state_.size() && (!state_.relay || state_.relay->is_completed());
  if (mismatch_ == 0) return is_known;
  if (mismatch_since_ns_ == 0) mismatch_since_ns_ = now_ns();
  bool all_known = is_known;
  for (int rank = 0; rank < state_.size(); ++rank) all_known = all_known && state_.has_announced(rank, mismatch_);
  if (!all_known && now_ns() - mismatch_since_ns_ < kMismatchWaitNs) return false;
  give_up(mismatch_of(state_, mismatch_, request_.descriptor.sequence));
  return true;
}

// In a rooted call: whether this rank's result is made of that rank's data.
bool CollectiveCall::awaits(int rank) const {
  const Descriptor& call = request_.descriptor;
  return gives(call.op, rank, call.root) && takes(call.op, state_.rank, call.root);
}

void CollectiveCall::compare_pairs() {
  const Descriptor& call = request_.descriptor;
  const auto table = [&](int rank) { return BufferTable(state_.member(rank).small(call.sequence), state_.size()); };
  // This rank's own counts are those of its arrays, whatever became of its buffer table, which the others can write.
  const auto given = [&](int from, int to) -> uint64_t {
    return from == state_.rank ? request_.inputs[static_cast<size_t>(to)].announced() : table(from).input(to).count;
  };
  const auto expected = [&](int from, int to) -> uint64_t {
    return to == state_.rank ? request_.outputs[static_cast<size_t>(from)].announced() : table(to).output(from).count;
  };
  if (auto fault = state_.counts.read(call, state_.size(), given, expected, state_.global_ranks))
    give_up(std::move(*fault));
}

void CollectiveCall::conclude() {
  state_.staging->end();
  if (!is_rooted_) state_.finish(request_.descriptor.sequence);
  finish();
}

// Without its leader a rank does not know who has come on the other hosts.
std::vector<int> CollectiveCall::missing() const {
  if (confirmation_) return confirmation_->awaited() < 0 ? std::vector<int>{} : std::vector{confirmation_->awaited()};
  if (is_transferring()) return awaited_;
  if (phase_ == Phase::kAnnounce) return missing_in_earlier();
  std::vector<int> ranks;
  const uint64_t sequence = request_.descriptor.sequence;
  const int leader = state_.topology.leader_of(state_.topology.own_host());
  const bool knows_all = is_rooted_ || state_.has_announced(leader, sequence);
  for (int rank = 0; rank < state_.size(); ++rank) {
    const bool awaited = phase_ == Phase::kExecute ? executor_.awaits(rank)
                                                   : !state_.has_announced(rank, sequence) &&
                                                         (!is_rooted_ || mismatch_ != 0 || awaits(rank)) &&
                                                         (knows_all || state_.topology.is_local(rank));
    if (awaited) ranks.push_back(rank);
  }
  return ranks;
}

// The ranks for which this one waits before it announces the call: those that have not announced the call that is
// compared next. If all have, those that have not compared it yet.
std::vector<int> CollectiveCall::missing_in_earlier() const {
  uint64_t finished = state_.finished;
  if (finished + 1 >= request_.descriptor.sequence || is_inline(state_, request_.descriptor))
    for (int rank = 0; rank < state_.size(); ++rank) finished = std::min(finished, state_.finished_by(rank));
  std::vector<int> late;
  std::vector<int> behind;
  for (int rank = 0; rank < state_.size(); ++rank) {
    if (rank == state_.rank) continue;
    if (!state_.has_announced(rank, finished + 1)) late.push_back(rank);
    if (state_.finished_by(rank) == finished) behind.push_back(rank);
  }
  return late.empty() ? behind : late;
}

}  // namespace procgroup
