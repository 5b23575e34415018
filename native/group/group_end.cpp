#include "group/group_end.hpp"

#include <utility>

#include "base/log.hpp"
#include "group/group.hpp"

namespace procgroup {

std::optional<Failure> GroupEnd::broken() const {
  if (!is_completed()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::optional<Lost> GroupEnd::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

// A call that fails ends the group. No caller waits for it, or the program may make another call before it does.
void GroupEnd::keep_unreported(Failure failure, Descriptor call, bool is_unawaited) {
  if (failure.is<Aborted>()) return;
  call = group_.calls().numbered(call);
  const std::lock_guard lock(mutex_);
  if (is_kept(call)) is_unawaited_ = is_unawaited_ || is_unawaited;
  if (reason_ || is_reported_) return;
  unreported_ = OperationFailed{std::move(failure), call};
  is_unawaited_ = is_unawaited;
}

bool GroupEnd::is_kept(const Descriptor& call) const {
  return unreported_ && unreported_->call.sequence == call.sequence && unreported_->call.op == call.op;
}

void GroupEnd::set_reported(const Descriptor& call) {
  const std::lock_guard lock(mutex_);
  if (!is_kept(call)) return;
  unreported_.reset();
  is_reported_ = true;
}

OperationFailed GroupEnd::reported(Failure failure, const Descriptor& call) {
  if (!failure.is<Broken, Lost, Failed>()) {
    set_reported(call);
    return {std::move(failure), call};
  }
  // Of a group that has ended the first is known; and who asks then may hold the mutex of the queue.
  const bool has_ended = failure.is<Broken>();
  const std::optional<Descriptor> earlier = has_ended ? std::nullopt : group_.calls().first_unawaited();
  const std::lock_guard lock(mutex_);
  const bool was_reported = std::exchange(is_reported_, true);
  if (std::optional<OperationFailed> unreported = std::exchange(unreported_, std::nullopt))
    return *std::move(unreported);
  const bool is_of_earlier = earlier && !was_reported;
  failure.wrote = failure.wrote || is_of_earlier;  // whose work on the device may have begun
  return {std::move(failure), is_of_earlier ? *earlier : call};
}

std::optional<OperationFailed> GroupEnd::take_unraised() {
  const std::lock_guard lock(mutex_);
  return is_unawaited_ ? std::exchange(unreported_, std::nullopt) : std::nullopt;
}

void GroupEnd::break_with(Failure failure, const Descriptor& call) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
    const Broken broken{failure.summary(&group_.members().global_ranks())};
    reason_ = broken;
    if (failure.is<Lost, Failed>() && failure.culprit() >= 0 && failure.culprit() != group_.rank()) {
      lost_ = Lost{.peer = failure.culprit(), .reason = broken.reason};
      group_.engine().identify(*lost_, group_.world_rank(failure.culprit()));
    }
  }
  completed_.store(true, std::memory_order_release);
  if (is_logged(LogLevel::kInfo))
    log_line(LogLevel::kInfo,
             "group " + group_.name() + " has ended: " + failure.summary(&group_.members().global_ranks()),
             group_.engine().global_rank(group_.engine().rank()));
  if (failure.call.sequence == 0) failure.call = call;
  // Another member's failure in a later call does not end an earlier one. Members that wait there for this rank read
  // its own.
  const Descriptor first = group_.calls().first_without_this_rank(call);
  if (!is_message(failure.call.op) && failure.call.sequence > first.sequence) {
    failure.call = first;
    failure.relayed = false;
  }
  group_.members().post(failure);
  if (failure.is<Mismatch>() && group_.members().spans_hosts()) group_.members().post_source_lines(call);
  if (group_.members().state()) group_.members().state()->wake_peers();
  if (end_device_work_) end_device_work_();
}

void GroupEnd::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
    reason_ = Broken{"this rank left the group"};
  }
  completed_.store(true, std::memory_order_release);
  CollectiveState* const state = group_.members().state() ? &*group_.members().state() : nullptr;
  if (state == nullptr) return;
  state->mine().memory().state.store(MemberState::kLeft, std::memory_order_seq_cst);
  state->wake_peers();
}

}  // namespace procgroup
