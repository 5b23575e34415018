#include "group/group_operation.hpp"

#include <algorithm>
#include <exception>

namespace procgroup {
namespace {

// Headers of messages that another backend moves have keys of their own, beside all keys of the group.
MessageKey header_key(uint64_t group, uint64_t tag) { return {~group, tag}; }

}  // namespace

void GroupOperation::watch() {
  watched_.store(true, std::memory_order_relaxed);
  group_.engine_.progress().notify();
}

QueuedCall::QueuedCall(Group& group, Request request, double seconds)
    : GroupOperation(group, seconds), request_(std::move(request)) {}

Progress QueuedCall::advance() {
  if (is_completed()) return Progress::kDone;
  if (!running_) {
    if (std::optional<Failure> broken = group_.broken()) {
      fail(std::move(*broken));
      return Progress::kDone;
    }
    group_.number(request_.descriptor);
    recording_.emplace(group_.engine_.recorder(), request_.descriptor);
    if (request_.before) request_.before();
    running_ = group_.make_call(request_);
  }
  const Progress progress = running_->advance();
  if (progress != Progress::kDone) return progress;
  if (running_->failure() == nullptr && request_.after) request_.after();
  end(running_->failure());
  return Progress::kDone;
}

void QueuedCall::end(const Failure* failure) {
  if (recording_) recording_->end(failure);
  failure == nullptr ? finish() : fail(group_.own_view(group_.cause_of(*failure)));
}

std::vector<int> QueuedCall::missing() const { return running_ ? running_->missing() : std::vector<int>{}; }

void QueuedCall::give_up(Failure failure) {
  if (running_) {
    running_->give_up(failure);
    failure.wrote = running_->failure() != nullptr && running_->failure()->wrote;
  }
  end(&failure);
}

MessageOperation::MessageOperation(Group& group, const MessageRequest& request, double seconds)
    : GroupOperation(group, seconds),
      request_(request),
      call_(group.describe(request)),
      header_{request.count, static_cast<uint64_t>(request.dtype)} {
  if (request.peer != kAnySource) return;
  for (const int member : group.options_.members)
    if (member != group.engine_.rank()) sources_.push_back(member);
}

MessageOperation::~MessageOperation() {
  if (transfer_ && !transfer_->is_completed()) give_up({.kind = Failure::Kind::kAborted});
}

Progress MessageOperation::advance() {
  if (is_completed()) return Progress::kDone;
  return header_moved_.load(std::memory_order_acquire) ? advance_external() : advance_transfer();
}

Progress MessageOperation::advance_transfer() {
  std::unique_lock lock(group_.engine_.messages_mutex());
  if (is_completed()) return Progress::kDone;
  const bool starts = !transfer_;
  if (starts) start();
  // To start a small message is enough: to look for what has come takes the channel's cache lines from its sender.
  const bool looks = !transfer_->is_completed() && !(starts && is_small_message(call_));
  const bool moved = looks ? group_.engine_.pump() : transfer_->is_completed();
  if (transfer_->is_completed()) {
    conclude();
    lock.unlock();
    // The sender has begun to move what this receive refuses.
    if (is_external() && failure() != nullptr && failure()->kind == Failure::Kind::kMismatch)
      group_.break_with(*failure(), call_);
    return is_completed() ? Progress::kDone : Progress::kMoved;
  }
  return moved ? Progress::kMoved : Progress::kWaiting;
}

Progress MessageOperation::advance_external() {
  const std::unique_lock lock(external_, std::try_to_lock);
  if (!lock) return Progress::kWaiting;
  if (is_completed()) return Progress::kDone;
  {
    const std::lock_guard messages(group_.engine_.messages_mutex());
    group_.engine_.pump();
    if (!has_turn()) return Progress::kWaiting;
  }
  std::optional<Failure> failure;
  try {
    if (!request_.transfer(request_.op == OpKind::kSend ? request_.peer : source())) return Progress::kWaiting;
    if (request_.after) request_.after();
  } catch (const std::exception& error) {
    failure = Failure{.kind = Failure::Kind::kBroken, .reason = std::string("it cannot go on: ") + error.what()};
  }
  recording_->end(failure ? &*failure : nullptr);
  if (failure) {
    group_.break_with(*failure, call_);
    fail(*std::move(failure));
    return Progress::kDone;
  }
  {
    const std::lock_guard messages(group_.engine_.messages_mutex());
    ++moved();
  }
  finish();
  return Progress::kDone;
}

uint64_t& MessageOperation::moved() const {
  const int peer = request_.op == OpKind::kSend ? request_.peer : source();
  return group_.external_messages_[{request_.op, peer, request_.tag}].moved;
}

bool MessageOperation::has_turn() const { return moved() + 1 == header_.number; }

void MessageOperation::start() {
  recording_.emplace(group_.engine_.recorder(), call_);
  Messages& messages = group_.engine_.messages();
  const uint64_t group = group_.options_.id;
  const MessageKey key = is_external() ? header_key(group, request_.tag) : MessageKey{group, request_.tag};
  if (is_external() && request_.op == OpKind::kSend)
    header_.number = ++group_.external_messages_[{request_.op, request_.peer, request_.tag}].issued;
  void* const data = is_external() ? &header_ : request_.data;
  const size_t bytes = is_external() ? sizeof header_ : request_.count * dtype_size(request_.dtype);
  const ElementType type = element_type(is_external() ? Dtype::kUint64 : request_.dtype);
  const int peer =
      request_.peer == kAnySource ? kAnySource : group_.options_.members[static_cast<size_t>(request_.peer)];
  transfer_ = request_.op == OpKind::kSend
                  ? messages.send(peer, key, data, bytes, type)
                  : messages.receive(peer, key, data, bytes, sources_.empty() ? nullptr : &sources_, type);
}

void MessageOperation::conclude() {
  const Failure* failure = transfer_->failure();
  if (failure == nullptr && is_external()) return compare_header();
  recording_->end(failure);
  if (failure == nullptr) {
    if (request_.after) request_.after();
    finish();
    return;
  }
  Failure mine = *failure;
  if (mine.peer >= 0) {
    group_.engine_.identify(mine, mine.peer);
    mine.peer = group_.group_rank(mine.peer);
  }
  mine.wrote = may_have_written();
  if (mine.kind == Failure::Kind::kMismatch && mine.peer >= 0)
    return fail_by_mismatch(mine, mine.reason + " to " + rank_name(group_.rank(), &group_.global_ranks()));
  fail(group_.own_view(std::move(mine)));
}

void MessageOperation::compare_header() {
  const bool equal = header_.count == request_.count && header_.dtype == static_cast<uint64_t>(request_.dtype);
  if (request_.op == OpKind::kSend || equal) {
    header_moved_.store(true, std::memory_order_release);
    return;
  }
  Descriptor theirs = call_;
  theirs.op = OpKind::kSend;
  theirs.root = group_.rank();
  theirs.count = header_.count;
  theirs.dtype = static_cast<Dtype>(std::min(header_.dtype, uint64_t{kDtypes}));  // one that does not exist stays so
  const Failure failure{.kind = Failure::Kind::kMismatch, .peer = source()};
  recording_->end(&failure);
  fail_by_mismatch(failure, theirs.describe(&group_.global_ranks()));
}

void MessageOperation::fail_by_mismatch(Failure failure, std::string theirs) {
  failure.calls.resize(static_cast<size_t>(group_.size()));
  failure.calls[static_cast<size_t>(group_.rank())] = call_.describe(&group_.global_ranks());
  failure.calls[static_cast<size_t>(failure.peer)] = std::move(theirs);
  fail(group_.own_view(std::move(failure)));
}

std::vector<int> MessageOperation::missing() const {
  return request_.peer == kAnySource ? std::vector<int>{} : std::vector<int>{request_.peer};
}

int MessageOperation::source() const {
  return transfer_ && transfer_->is_completed() && request_.op == OpKind::kRecv ? group_.group_rank(transfer_->source)
                                                                                : -1;
}

std::optional<Awaited> MessageOperation::awaited() const {
  const std::lock_guard lock(group_.engine_.messages_mutex());
  const bool open = transfer_ && !transfer_->is_completed() && transfer_->source < 0;
  if (!open || request_.peer == kAnySource) return std::nullopt;
  return Awaited{request_.op, request_.tag, {group_.options_.members[static_cast<size_t>(request_.peer)]}};
}

void MessageOperation::give_up(Failure failure) {
  const std::unique_lock external = is_external() ? std::unique_lock(external_) : std::unique_lock<std::mutex>();
  // The other rank may have begun to move the message, and all later ones wait for this one.
  if (header_moved_ && !is_completed()) group_.break_with(failure, call_);
  const std::lock_guard lock(group_.engine_.messages_mutex());
  if (transfer_ && !transfer_->is_completed()) group_.engine_.messages().cancel(*transfer_, failure);
  if (is_completed()) return;
  failure.wrote = may_have_written();
  if (recording_) recording_->end(&failure);
  fail(std::move(failure));
}

}  // namespace procgroup
