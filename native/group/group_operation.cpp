#include "group/group_operation.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "group/group.hpp"

namespace procgroup {
namespace {

// Headers of messages that another backend moves have keys of their own, beside all keys of the group.
MessageKey header_key(uint64_t group, uint64_t tag) { return {~group, tag}; }

// The receiver's answer to the header of a message on a device, by the number that the sender gave the message. No tag
// has the highest bit.
MessageKey acceptance_key(uint64_t group, uint64_t number) { return {~group, number | uint64_t{1} << 63}; }

}  // namespace

Descriptor GroupOperation::call() const {
  Descriptor call = call_;
  call.sequence = number_.load(std::memory_order_relaxed);
  return call;
}

void GroupOperation::end_group(const Failure& failure, bool is_unawaited) {
  group_.end().keep_unreported(failure, call_, is_unawaited);
  group_.end().break_with(failure, call_);
}

void GroupOperation::watch() {
  watched_.store(true, std::memory_order_relaxed);
  group_.engine().progress().notify();
  group_.engine().kick();  // it may sleep longer than work on a device should wait for a look
}

CollectiveOperation::CollectiveOperation(Group& group, Request request, double seconds)
    : GroupOperation(group, request.descriptor, seconds, request.is_unawaited),
      request_(std::move(request)),
      is_polling_(request_.task != nullptr) {
  recording_.emplace(Recording::issued(group_.engine().recorder(), call_, request_.source));
}

Progress CollectiveOperation::advance() {
  if (is_completed()) return Progress::kDone;
  if (!running_) {
    if (request_.after_device_work && group_.devices().has_collectives()) return Progress::kWaiting;
    if (std::optional<Failure> broken = group_.end().broken()) {
      recording_->end(&*broken);
      fail(std::move(*broken));
      return Progress::kDone;
    }
    const auto look = [this] { awaits_arrays_ = request_.task && !request_.task->ready(); };
    if (const std::optional<Failure> failure = failure_of(look)) {
      end(&*failure);
      return Progress::kDone;
    }
    if (awaits_arrays_) return Progress::kWaiting;
    group_.calls().number(request_.descriptor);
    set_number(request_.descriptor.sequence);
    recording_->start(request_.descriptor);
    if (request_.before) request_.before();
    running_.emplace(*group_.members().state(), request_);
  }
  const Progress progress = running_->advance();
  is_polling_ = request_.task && running_->longest_sleep_ns() != kAnySleepNs;
  if (progress != Progress::kDone) return progress;
  std::optional<Failure> failure;
  if (running_->failure() == nullptr)
    failure = failure_of([this] { queue(group_.calls().conclude(request_, *running_, seconds_, *recording_)); });
  end(failure ? &*failure : running_->failure());
  return Progress::kDone;
}

void CollectiveOperation::end(const Failure* failure) {
  if (!device_work()) recording_->end(failure);
  std::optional<Failure> own;
  if (failure != nullptr) own = group_.watch().cause_of(*failure);
  group_.calls().end_turn(*this, own ? &*own : nullptr);
  own ? fail(*std::move(own)) : finish();
}

// Once it has been numbered.
std::optional<Awaited> CollectiveOperation::awaited() {
  const std::unique_lock held = group_.calls().hold();
  return running_ && !is_completed() ? std::optional(group_.watch().awaited(*running_, request_.descriptor))
                                     : std::nullopt;
}

std::vector<int> CollectiveOperation::missing() const { return running_ ? running_->missing() : std::vector<int>{}; }

void CollectiveOperation::give_up(Failure failure) {
  if (running_) {
    running_->give_up(std::move(failure));
    failure = *running_->failure();
  } else {
    if (auto* timeout = failure.as<Timeout>(); timeout != nullptr && awaits_arrays_)
      timeout->reason = "the work that was queued on its GPU before the call";
    if (request_.task) request_.task->cancel();
  }
  end(&failure);
}

MessageOperation::MessageOperation(Group& group, const MessageRequest& request, double seconds)
    : GroupOperation(group, group.messages().describe(request), seconds, request.is_unawaited),
      request_(request),
      header_{request.count, static_cast<uint64_t>(request.dtype), call_.sequence} {
  if (request.peer != kAnySource) return;
  for (const int member : group.world_ranks())
    if (member != group.engine().rank()) sources_.push_back(member);
}

MessageOperation::~MessageOperation() {
  if (group_.engine().forked()) return;  // the mutex may be held for ever
  if (transfer_ && !transfer_->is_completed()) give_up(Aborted{});
  if (!is_external()) return;
  const std::lock_guard lock(group_.engine().messages_mutex());
  group_.messages().forget(this);
}

Progress MessageOperation::advance() {
  bool looks = true;
  return advance(looks);
}

Progress MessageOperation::advance(bool& looks) {
  if (is_completed()) return Progress::kDone;
  return header_moved_.load(std::memory_order_acquire) ? advance_task() : advance_transfer(looks);
}

Progress MessageOperation::advance_transfer(bool& looks) {
  std::unique_lock lock(group_.engine().messages_mutex());
  if (is_completed()) return Progress::kDone;
  if (header_moved_.load(std::memory_order_relaxed)) return Progress::kMoved;  // another thread was here meanwhile
  const bool starts = !transfer_;
  if (starts) start();
  // To start a small message is enough: to look for what has come takes the channel's cache lines from its sender.
  const bool is_moved = transfer_->is_completed();
  const bool looks_now = looks && !is_moved && !(starts && is_small_message(call_));
  const bool moved = looks_now ? group_.engine().pump() : is_moved;
  if (looks_now) looks = moved;
  if (transfer_->is_completed()) {
    conclude();
    lock.unlock();
    // The sender has begun to move what this receive refuses.
    if (is_external() && failure() != nullptr && failure()->is<Mismatch>()) end_group(*failure(), is_unawaited());
    return is_completed() ? Progress::kDone : Progress::kMoved;
  }
  return moved ? Progress::kMoved : Progress::kWaiting;
}

Progress MessageOperation::advance_task() {
  const std::unique_lock lock(advancing_, std::try_to_lock);
  if (!lock) return Progress::kWaiting;
  if (is_completed()) return Progress::kDone;
  {
    const std::lock_guard messages(group_.engine().messages_mutex());
    group_.engine().pump();
    // Devices have the order of accept().
    if (is_external() && !request_.on_device && !group_.messages().has_turn(*this)) return Progress::kWaiting;
  }
  bool is_done = false;
  std::optional<Failure> failure = failure_of([&] {
    std::vector<int> awaited{peer()};  // unless the task says something else
    if (!task_) request_.task->start(peer(), header_.number);
    if (!task_ || task_ == Task::State::kPending) task_ = request_.task->test(awaited);
    const bool has_moved = task_ != Task::State::kPending;
    awaits_peer_ = !has_moved && std::ranges::find(awaited, peer()) != awaited.end();
    // The engine finds the loss within moments, and that ends the message.
    is_done = has_moved && !has_dead_sender();
    if (is_done && request_.after) request_.after();
    if (is_done && task_ == Task::State::kQueued) {
      Descriptor queued = call_;
      queued.root = peer();
      queue(group_.devices().follow(queued, request_.task, seconds_, is_unawaited(), recording_));
    }
  });
  if (!is_done && !failure) return Progress::kWaiting;
  if (!device_work()) recording_->end(failure ? &*failure : nullptr);
  if (failure) {
    end_group(*failure, is_unawaited());
    fail(*std::move(failure));
    return Progress::kDone;
  }
  {
    const std::lock_guard messages(group_.engine().messages_mutex());
    group_.messages().forget(this);
  }
  finish();
  return Progress::kDone;
}

// MPICH reports success where it could not read the memory of a process that was killed, as in collectives.
bool MessageOperation::has_dead_sender() const {
  if (!is_external() || request_.on_device || request_.op != OpKind::kRecv) return false;
  const PeerMemory* sender = group_.engine().peer_memory(group_.world_rank(peer()));
  return sender != nullptr && sender->has_died(call_.bytes());
}

void MessageOperation::start() {
  recording_.emplace(group_.engine().recorder(), call_, request_.source);
  Messages& messages = group_.engine().messages();
  const uint64_t group = group_.id();
  const MessageKey key = is_external() ? header_key(group, request_.tag) : MessageKey{group, request_.tag};
  if (is_external()) group_.messages().add_external(this);
  void* const data = is_external() ? &header_ : request_.data;
  const size_t bytes = is_external() ? sizeof header_ : request_.count * dtype_size(request_.dtype);
  const ElementType type = element_type(is_external() ? Dtype::kUint64 : request_.dtype);
  const int peer = request_.peer == kAnySource ? kAnySource : group_.world_rank(request_.peer);
  transfer_ = request_.op == OpKind::kSend
                  ? messages.send(peer, key, data, bytes, type)
                  : messages.receive(peer, key, data, bytes, sources_.empty() ? nullptr : &sources_, type);
}

void MessageOperation::conclude() {
  const Failure* failure = transfer_->failure();
  if (failure == nullptr && is_external()) return compare_header();
  if (failure == nullptr && request_.task) return header_moved_.store(true, std::memory_order_release);
  recording_->end(failure);
  if (failure == nullptr) {
    if (request_.after) request_.after();
    finish();
    return;
  }
  Failure mine = group_.members().view().by_group_rank(*failure);
  mine.wrote = may_have_written();
  if (const auto* mismatch = mine.as<Mismatch>(); mismatch != nullptr && mismatch->peer >= 0)
    return fail_by_mismatch(mine,
                            mismatch->reason + " to " + rank_name(group_.rank(), &group_.members().global_ranks()));
  fail(group_.watch().present(std::move(mine)));
}

void MessageOperation::compare_header() {
  const bool equal = header_.count == request_.count && header_.dtype == static_cast<uint64_t>(request_.dtype);
  if (request_.op == OpKind::kSend || equal) {
    if (request_.on_device && request_.op == OpKind::kSend && !awaits_acceptance_) return await_acceptance();
    if (request_.on_device && request_.op == OpKind::kRecv) accept();
    header_moved_.store(true, std::memory_order_release);
    return;
  }
  Descriptor theirs = call_;
  theirs.op = OpKind::kSend;
  theirs.external = theirs.on_device = false;  // as this receive, which goes without saying
  theirs.root = group_.rank();
  theirs.count = header_.count;
  theirs.dtype = static_cast<Dtype>(std::min(header_.dtype, uint64_t{kDtypes}));  // one that does not exist stays so
  const Failure failure = Mismatch{.peer = source()};
  recording_->end(&failure);
  fail_by_mismatch(failure, theirs.describe(&group_.members().global_ranks()));
}

// Give the message its place among those that this rank has matched of the sender, and let the sender know.
void MessageOperation::accept() {
  const MessageKey key = acceptance_key(group_.id(), header_.number);
  header_.number = group_.messages().number_matched(source());
  std::vector<std::byte> place(sizeof header_.number);
  std::memcpy(place.data(), &header_.number, place.size());
  group_.engine().messages().post(group_.world_rank(source()), key, std::move(place));
}

void MessageOperation::await_acceptance() {
  const MessageKey key = acceptance_key(group_.id(), header_.number);
  const int receiver = group_.world_rank(request_.peer);
  awaits_acceptance_ = true;
  transfer_ = group_.engine().messages().receive(receiver, key, &header_.number, sizeof header_.number);
}

void MessageOperation::fail_by_mismatch(Failure failure, std::string theirs) {
  auto& [calls, reason, peer] = *failure.as<Mismatch>();
  calls.resize(static_cast<size_t>(group_.size()));
  calls[static_cast<size_t>(group_.rank())] = call_.describe(&group_.members().global_ranks());
  calls[static_cast<size_t>(peer)] = std::move(theirs);
  fail(std::move(failure));
}

std::vector<int> MessageOperation::missing() const {
  if (header_moved_.load(std::memory_order_acquire)) return {peer()};
  return request_.peer == kAnySource ? std::vector<int>{} : std::vector<int>{request_.peer};
}

uint64_t MessageOperation::moved() const {
  const std::lock_guard lock(group_.engine().messages_mutex());
  return transfer_ ? transfer_->moved() : 0;
}

int MessageOperation::source() const {
  return transfer_ && transfer_->is_completed() && request_.op == OpKind::kRecv
             ? group_.members().group_rank(transfer_->source)
             : -1;
}

std::optional<Awaited> MessageOperation::awaited() {
  // The header of a message that a task moves goes ahead, and the task may wait for the receive: it is asked again,
  // since the other rank may have received meanwhile. A rank that has matched the header waits for nobody.
  const bool may_await = request_.op == OpKind::kSend && is_external() && !request_.on_device && awaits_peer_;
  if (may_await) advance_task();
  const std::lock_guard lock(group_.engine().messages_mutex());
  const bool is_open = transfer_ && !transfer_->is_completed() && transfer_->source < 0;
  const bool awaits_receive = may_await && awaits_peer_ && !is_completed();
  if (!(is_open || awaits_receive) || request_.peer == kAnySource) return std::nullopt;
  return Awaited{request_.op, request_.tag, {group_.world_rank(request_.peer)}};
}

GroupOperation::Beside MessageOperation::beside(const std::vector<int>& awaited) const {
  if (request_.on_device || (request_.task && !is_external())) return Beside::kAnything;
  if (request_.op == OpKind::kSend || (is_small_message(call_) && !is_external())) return Beside::kNothing;
  const std::lock_guard lock(group_.engine().messages_mutex());
  // It has answered; but the sender of a message that a task moves has not seen that.
  if (transfer_->source >= 0) return is_external() ? Beside::kAnything : Beside::kNothing;
  const bool is_from_awaited =
      request_.peer != kAnySource && awaited.size() == 1 && group_.world_rank(request_.peer) == awaited.front();
  return is_from_awaited ? Beside::kOpenReceive : Beside::kAnything;
}

void MessageOperation::give_up(Failure failure) {
  const std::unique_lock advancing = request_.task ? std::unique_lock(advancing_) : std::unique_lock<std::mutex>();
  // Without the mutex of messages: a task in Python takes the interpreter's lock, with which another thread may wait
  // for that mutex, as in the destructor of a message.
  if (request_.task && !is_completed()) request_.task->cancel();
  std::unique_lock lock(group_.engine().messages_mutex());
  if (transfer_ && !transfer_->is_completed()) group_.engine().messages().cancel(*transfer_, failure);
  if (is_completed()) return;
  failure = group_.watch().present(std::move(failure));
  failure.wrote = may_have_written();
  failure.note = group_.messages().unread(request_);
  if (recording_) recording_->end(&failure);
  // The other rank may have begun to move a message whose header has gone, and all later ones wait for this one.
  const bool has_begun = is_external() && transfer_ && (awaits_acceptance_ || transfer_->failure() == nullptr);
  if (!has_begun) group_.messages().forget(this);
  Failure ended = failure;
  fail(std::move(failure));
  lock.unlock();
  if (has_begun) end_group(ended, is_unawaited());
}

Progress DeviceOperation::advance() {
  const std::unique_lock lock(advancing_, std::try_to_lock);
  if (!lock) {  // another thread looks, and may have done so before the end for which the caller asks
    std::this_thread::yield();
    return Progress::kMoved;
  }
  if (is_completed()) return Progress::kDone;
  bool is_done = false;
  std::vector<int> ignored;
  const auto look = [&] { is_done = task_->test(ignored) != Task::State::kQueued; };
  if (const std::optional<Failure> failure = failure_of(look)) {
    if (group_.end().is_completed()) return Progress::kWaiting;  // a consequence: examine_pending() has the cause
    fail_with_group(*failure);
    return Progress::kDone;
  }
  // An abort also makes the device finish. That is a failure, which examine_pending() reports.
  if (!is_done || group_.end().is_completed()) return Progress::kWaiting;
  end(nullptr);
  return Progress::kDone;
}

void DeviceOperation::give_up(Failure failure) {
  const std::lock_guard lock(advancing_);
  if (is_completed()) return;
  if (auto* timeout = failure.as<Timeout>(); timeout != nullptr && !is_replay())
    timeout->reason = "the work that it has started on its GPU, which may wait for any of the other ranks";
  failure = group_.watch().cause_of(std::move(failure));
  failure.wrote = true;
  fail_with_group(failure);
}

// Also of an asynchronous call: a wait for it may have succeeded already, when the ranks had agreed.
void DeviceOperation::fail_with_group(const Failure& failure) {
  end_group(failure, true);
  end(&failure);
}

// What the task refers to may refer to this operation.
void DeviceOperation::end(const Failure* failure) {
  if (failure != nullptr) task_->cancel();
  task_.reset();
  if (recording_) recording_->end(failure);
  failure == nullptr ? finish() : fail(*failure);
}

}  // namespace procgroup
