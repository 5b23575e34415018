#include "group/call_queue.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/processor.hpp"
#include "group/group.hpp"

namespace procgroup {
namespace {

// How long the caller of an asynchronous call waits for the other ranks' part of it.
constexpr int64_t kAlongNs = 200'000;

// What a task throws here, it throws again in the call's turn.
bool is_ready(const Request& request) {
  try {
    return !request.task || request.task->ready();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

// Advance the operation in a few polls, with the language's lock held. One that keeps moving is large, and takes long
// enough to let other threads run. Not in the anonymous namespace, so that a stack has its name.
static Progress poll(Operation& operation, const WaitPolicy& policy) {
  Progress progress = policy.is_helping ? operation.help() : operation.advance();
  for (int polls = policy.held_polls(); progress == Progress::kWaiting && polls > 0; --polls) {
    cpu_pause();
    progress = policy.is_helping ? operation.help() : operation.advance();
  }
  return progress;
}

void CallQueue::run(Request& request, double seconds, LanguageRuntime& language) {
  require_usable(request.descriptor);
  const bool waits = !is_ready(request) || (request.after_device_work && group_.devices().has_collectives());
  const bool idle = queued_.load(std::memory_order_acquire) == 0 && !waits;
  if (!idle || busy_.exchange(true, std::memory_order_acquire)) return complete(*start(request, seconds), language);
  const std::unique_ptr<CallQueue, FinishTurn> turn(this);
  number(request.descriptor);
  Recording recording(group_.engine().recorder(), request.descriptor, request.source);
  if (request.before) {
    const Released released(language);
    request.before();
  }
  CollectiveCall call(*group_.members().state(), request);
  std::optional<Failure> failure;
  bool is_queued = false;
  if (poll(call, group_.engine().policy()) != Progress::kDone || call.failure() != nullptr) {
    const auto awaited_ranks = [&] { return group_.watch().awaited(call, request.descriptor); };
    failure = group_.watch().complete(call, request.descriptor, awaited_ranks, seconds, language);
    if (failure) group_.end().break_with(*failure, request.descriptor);
  }
  if (!failure && (request.after || request.task)) {
    const Released released(language);
    failure = failure_of([&] { is_queued = conclude(request, call, seconds, recording) != nullptr; });
    if (failure) group_.end().break_with(*failure, request.descriptor);
  }
  if (!is_queued) recording.end(failure ? &*failure : nullptr);
  if (failure) throw group_.end().reported(*std::move(failure), request.descriptor);
}

// After a call has gone well. Return what goes on on a device.
std::shared_ptr<GroupOperation> CallQueue::conclude(const Request& request, const CollectiveCall& call, double seconds,
                                                    const Recording& recording) {
  const Descriptor& made = request.descriptor;
  bool is_queued = call.is_queued();
  if (request.task && !made.external) {
    std::vector<int> awaited;
    request.task->start(made.root, made.sequence);
    is_queued = request.task->test(awaited) == Task::State::kQueued;
  }
  if (request.after) request.after();
  return is_queued ? group_.devices().follow(made, request.task, seconds, request.is_unawaited, recording) : nullptr;
}

void CallQueue::complete(GroupOperation& operation, LanguageRuntime& language) {
  const Outcome outcome = await(operation, Deadline::never(), language);
  if (outcome.is_interrupted) {
    end_interrupted(operation, language);
    throw OperationFailed{Interrupted{}, operation.call()};
  }
  if (outcome.failure) throw group_.end().reported(*outcome.failure, numbered(operation.call()));
}

std::shared_ptr<GroupOperation> CallQueue::start(Request request, double seconds, LanguageRuntime* language) {
  // A group of one rank waits for nobody: its calls complete when they are issued.
  const bool runs_along = language != nullptr && (!group_.engine().policy().core_to_spare || group_.size() == 1) &&
                          queued_.load(std::memory_order_acquire) == 0;
  const bool is_light = request.descriptor.on_device;
  auto [operation, is_first] = enqueue(std::move(request), seconds);
  std::optional<Released> released;
  if (language != nullptr && (runs_along || is_light)) released.emplace(*language);
  bool wakes = true;
  if (runs_along)
    run_along(*operation);
  else if (is_light)
    wakes = is_first && announce(*operation);
  if (!operation->is_completed()) {
    group_.engine().progress().notify();
    if (wakes) group_.engine().kick();
  }
  return std::move(operation);
}

// Take part, without waiting, in a call whose bytes a device moves, which costs this thread little. Whether the
// progress thread has to be woken for it then: else the other ranks do that. A call behind others is begun by whoever
// ends those.
bool CallQueue::announce(GroupOperation& operation) {
  std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) return true;
  advance_head(&operation);
  driving.unlock();
  // The progress thread may have looked meanwhile, for the last time before it sleeps.
  return has_missed_look_.exchange(false, std::memory_order_seq_cst) || group_.engine().uses_sockets() ||
         operation.longest_sleep_ns() != kAnySleepNs;
}

void CallQueue::run_along(const GroupOperation& operation) {
  WaitPolicy policy = group_.engine().policy();
  policy.spin_ns = kAlongNs;
  WaitBudget budget(policy);
  const uint32_t known = group_.engine().news().load(std::memory_order_acquire);
  while (!operation.is_completed()) {
    const Progress progress = advance(&operation);
    if (group_.engine().news().load(std::memory_order_relaxed) != known) return;
    if (!budget.spend(progress) && progress != Progress::kMoved) return;
  }
}

// With the operation, whether nothing was queued before it.
std::pair<std::shared_ptr<GroupOperation>, bool> CallQueue::enqueue(Request request, double seconds) {
  const std::lock_guard lock(mutex_);
  // Under the mutex: what is queued after leave() would never end.
  require_usable(request.descriptor, queue_.empty() ? nullptr : queue_.back().get());
  identify(request.descriptor);
  auto operation = std::make_shared<CollectiveOperation>(group_, std::move(request), seconds);
  queue_.push_back(operation);
  const bool is_first = queued_.fetch_add(1, std::memory_order_seq_cst) == 0;
  return {std::move(operation), is_first};
}

void CallQueue::finish_turn() {
  ended_.store(sequence_.load(std::memory_order_relaxed), std::memory_order_release);
  busy_.store(false, std::memory_order_release);
  if (queued_.load(std::memory_order_seq_cst) != 0) group_.engine().kick();
}

// Only one thread at a time takes from the queue, so its head stays the head while it is advanced.
Progress CallQueue::advance(const GroupOperation* own) {
  std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) {
    has_missed_look_.store(true, std::memory_order_seq_cst);  // see announce(), which has the lock when this one fails
    if (!driving.try_lock()) return Progress::kWaiting;
  }
  return advance_head(own);
}

// With driving_. Nobody waits yet for a call that this thread issues, `own`.
Progress CallQueue::advance_head(const GroupOperation* own) {
  std::shared_ptr<GroupOperation> head;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return Progress::kDone;
    head = queue_.front();
  }
  if (!head_has_turn_) {
    if (busy_.exchange(true, std::memory_order_acquire)) return Progress::kWaiting;
    head_has_turn_ = true;
  }
  if (const Progress progress = head->advance(); progress != Progress::kDone) return progress;
  if (const Failure* failure = head->failure()) end_with(*head, *failure);  // for a call that failed before its turn
  {
    const std::lock_guard lock(mutex_);
    queue_.pop_front();
    queued_.fetch_sub(1, std::memory_order_seq_cst);
  }
  head_has_turn_ = false;
  finish_turn();
  if (head.get() != own) group_.engine().completed();
  return Progress::kMoved;
}

bool CallQueue::has_turn(const GroupOperation& operation) {
  const std::lock_guard lock(mutex_);
  return head_has_turn_ && !queue_.empty() && queue_.front().get() == &operation;
}

void CallQueue::end_with(const GroupOperation& operation, const Failure& failure) {
  group_.end().break_with(failure, numbered(operation.call()));
}

void CallQueue::identify(Descriptor& call) const {
  call.group = group_.id();
  call.ordered = ordered_ && reduces(call.op);
}

void CallQueue::number(Descriptor& call) {
  identify(call);
  call.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool CallQueue::takes_iovecs(const Descriptor& call) const {
  const bool copies_once = call.op == OpKind::kBroadcast || call.op == OpKind::kAllGather;
  return copies_once && !is_small(*group_.members().state(), call);
}

bool CallQueue::is_announced_whole(const Descriptor& call) const { return is_inline(*group_.members().state(), call); }

const char* CallQueue::last_schedule() const {
  if (!group_.members().state()) return "";
  const bool is_large = group_.members().state()->chosen.sequence == sequence_.load(std::memory_order_relaxed);
  return is_large ? group_.members().state()->chosen.name : "small";
}

// A call that fails before its turn ends the group when that comes.
void CallQueue::require_usable(Descriptor call, const GroupOperation* last_queued) {
  std::optional<Failure> ended = group_.end().broken();
  if (!ended && last_queued && last_queued->is_completed() && last_queued->failure())
    ended = Broken{last_queued->failure()->summary(&group_.members().global_ranks())};
  if (!ended) return;
  throw group_.end().reported(*std::move(ended), numbered(call));
}

// The first call that has not ended and that nobody waits for: what ends the calls behind it ends it, too. A call's
// work on a device is there before the call leaves the queue.
std::optional<Descriptor> CallQueue::first_unawaited() {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<GroupOperation> first = group_.devices().first_collective();
  if (!first && !queue_.empty()) first = queue_.front();
  if (!first || !first->is_unawaited()) return std::nullopt;
  return numbered(first->call());
}

Descriptor CallQueue::numbered(Descriptor call) const {
  if (call.sequence == 0 && !is_message(call.op)) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  return call;
}

// The first collective that this rank will not complete once it fails in `call`.
Descriptor CallQueue::first_without_this_rank(const Descriptor& call) const {
  if (call.sequence != 0 && !is_message(call.op)) return call;
  Descriptor first;
  first.group = group_.id();
  first.sequence = ended_.load(std::memory_order_acquire) + 1;
  return first;
}

// While a call is running, that call compares the earlier ones itself.
void CallQueue::break_with_unseen() {
  if (!group_.members().state() || group_.end().is_completed() || busy_.exchange(true, std::memory_order_acquire))
    return;
  const uint64_t last = sequence_.load(std::memory_order_relaxed);
  std::optional<Failure> mismatch = unseen_mismatch(*group_.members().state(), last, last + 1);
  busy_.store(false, std::memory_order_release);
  if (!mismatch) return;
  const Descriptor call = mismatch->call;
  group_.end().keep_unreported(*mismatch, call, true);
  group_.end().break_with(*std::move(mismatch), call);
}

// The progress thread, which advances the operation, too, examines it for everything but deadlocks: only a thread that
// waits can be part of one.
CallQueue::Outcome CallQueue::await(GroupOperation& operation, Deadline deadline, LanguageRuntime& language) {
  Engine& engine = group_.engine();
  Watch& watch = group_.watch();
  DeadlockDetector detector(engine, std::min(operation.seconds(), deadline.remaining_seconds()),
                            engine.suspicious_ns());
  const auto awaited = [&]() -> std::optional<Awaited> {
    std::optional<Awaited> found = operation.awaited();
    if (!found) return std::nullopt;  // a queued call has no number yet, and the progress thread may be writing it
    return watch.unless_failed(operation, operation.call(), std::move(found));
  };
  const auto look = [&](const Operation&) { return watch.find_deadlock(detector, operation, awaited, language); };
  WaitPolicy policy = engine.policy().for_bytes(operation.call().bytes());
  policy.is_helping = true;
  if (poll(operation, policy) != Progress::kDone) {
    const Released released(language);
    const Operation::Awaiting awaiting(operation);
    WaitBudget budget(policy, deadline);
    std::optional<Failure> end = wait(operation, budget, engine, language, std::cref(look));
    if (end && end->is<Interrupted>()) return {.is_interrupted = true};
    if (end && end->is<Timeout>()) return {};
    if (end) give_up(operation, *std::move(end));
  }
  if (operation.failure() == nullptr) return {.has_completed = true};
  std::optional<Failure> deadlock = detector.announced();
  return {.has_completed = true, .failure = deadlock ? std::move(deadlock) : std::optional(*operation.failure())};
}

// The call may be running in the progress thread, with this caller's arrays: it has to end first.
void CallQueue::end_interrupted(GroupOperation& operation, LanguageRuntime& language) {
  group_.end().break_with(Interrupted{}, operation.call());
  const Released released(language);
  while (!operation.is_completed()) group_.engine().sleep(1'000'000, [&] { return operation.is_completed(); });
}

// End an operation from the thread that waits for it; one of the queue is at its head.
void CallQueue::give_up(GroupOperation& operation, Failure failure) {
  const std::lock_guard driving(driving_);
  if (operation.is_completed()) return;
  operation.give_up(std::move(failure));
  if (!is_message(operation.call().op)) end_with(operation, *operation.failure());
}

bool CallQueue::is_empty() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty();
}

// Queued calls count, because another rank may have seen the agreement on them already.
bool CallQueue::has_device_calls() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(queue_, [](const auto& one) { return one->call().on_device; });
}

int64_t CallQueue::longest_sleep_ns() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? kAnySleepNs : queue_.front()->longest_sleep_ns();
}

bool CallQueue::has_other_than(const Operation& waited) const {
  const std::lock_guard lock(mutex_);
  return !queue_.empty() && queue_.front().get() != &waited;
}

// Before the call completes, because a thread that waits for it may then leave the group, or ask whether it has failed.
void CallQueue::end_turn(const GroupOperation& operation, const Failure* failure) {
  const Descriptor call = operation.call();
  if (call.sequence != 0) ended_.store(call.sequence, std::memory_order_release);
  if (failure == nullptr) return;
  group_.end().keep_unreported(*failure, call, operation.is_unawaited());
  if (has_turn(operation)) end_with(operation, *failure);
}

std::vector<std::shared_ptr<GroupOperation>> CallQueue::pending() const {
  const std::lock_guard lock(mutex_);
  return {queue_.begin(), queue_.end()};
}

// What the first call waits for, those behind it wait for, too. To advance these would start them.
void CallQueue::examine() {
  const std::lock_guard driving(driving_);
  std::vector<std::shared_ptr<GroupOperation>> waiting = pending();
  Watch& watch = group_.watch();
  std::vector<int> missing;
  if (head_has_turn_ && !waiting.empty()) {
    missing = waiting.front()->missing();
    if (!waiting.front()->is_completed()) watch.record_awaited(waiting.front()->call(), missing);
    watch.examine_running(*waiting.front());
    waiting.erase(waiting.begin());
  }
  for (const std::shared_ptr<GroupOperation>& operation : waiting) {
    std::optional<Failure> failure = operation->is_completed() ? std::nullopt : watch.what_ends(*operation);
    if (!failure) continue;
    if (auto* timeout = failure->as<Timeout>()) {
      timeout->missing = missing;
      watch.explain(*failure);
    }
    operation->give_up(watch.present(*std::move(failure), missing));
  }
}

}  // namespace procgroup
