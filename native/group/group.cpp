#include "group/group.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/processor.hpp"
#include "group/group_operation.hpp"
#include "runtime/recording.hpp"

namespace procgroup {
namespace {

// In place of a message's operation and peer, in the name of a device's queue.
constexpr std::pair kCollectives{OpKind::kBarrier, -1};
constexpr std::pair kReplays{OpKind::kBarrier, -2};

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

// Advance the operation in a few polls, with the language's lock held. One that keeps moving is large, and takes long
// enough to let other threads run.
Progress poll(Operation& operation, const WaitPolicy& policy) {
  Progress progress = operation.help();
  for (int polls = policy.held_polls(); progress == Progress::kWaiting && polls > 0; --polls) {
    cpu_pause();
    progress = operation.help();
  }
  return progress;
}

}  // namespace

void Group::run(Request& request, double seconds, LanguageRuntime& language) {
  require_usable(request.descriptor);
  const bool waits = !is_ready(request) || (request.after_device_work && has_device_work());
  const bool idle = queued_.load(std::memory_order_acquire) == 0 && !waits;
  if (!idle || busy_.exchange(true, std::memory_order_acquire)) return run_queued(request, seconds, language);
  const Turn turn(*this);
  number(request.descriptor);
  Recording recording(engine_.recorder(), request.descriptor, request.source);
  if (request.before) {
    const Released released(language);
    request.before();
  }
  CollectiveCall call(*state_, request);
  std::optional<Failure> failure;
  bool is_queued = false;
  if (poll(call, engine_.policy()) != Progress::kDone || call.failure() != nullptr) {
    const auto awaited_ranks = [&] { return awaited(call, request.descriptor); };
    failure = complete_watched(call, request.descriptor, awaited_ranks, seconds, language);
    if (failure) break_with(*failure, request.descriptor);
  }
  if (!failure && (request.after || request.task)) {
    const Released released(language);
    failure = failure_of([&] { is_queued = conclude(request, call, seconds, recording) != nullptr; });
    if (failure) break_with(*failure, request.descriptor);
  }
  if (!is_queued) recording.end(failure ? &*failure : nullptr);
  if (failure) throw reported(*std::move(failure), request.descriptor);
}

// After a call has gone well. Return what goes on on a device.
std::shared_ptr<GroupOperation> Group::conclude(const Request& request, const CollectiveCall& call, double seconds,
                                                const Recording& recording) {
  const Descriptor& made = request.descriptor;
  bool is_queued = call.is_queued();
  if (request.task && !made.external) {
    std::vector<int> awaited;
    request.task->start(made.root, made.sequence);
    is_queued = request.task->test(awaited) == Task::State::kQueued;
  }
  if (request.after) request.after();
  return is_queued ? follow(made, request.task, seconds, request.is_unawaited, recording) : nullptr;
}

void Group::run_queued(const Request& request, double seconds, LanguageRuntime& language) {
  const std::shared_ptr<GroupOperation> operation = start(request, seconds);
  bool interrupted = false;
  const std::optional<Failure> failure = await(*operation, Deadline::never(), language, interrupted).failure;
  if (interrupted) {
    end_interrupted(*operation, language);
    throw OperationFailed{{.kind = Failure::Kind::kInterrupted}, operation->call()};
  }
  if (failure) {
    Descriptor call = operation->call();
    if (call.sequence == 0) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
    throw reported(*failure, call);
  }
}

// The progress thread, which advances the operation, too, examines it for everything but deadlocks: only a thread that
// waits can be part of one.
Group::Outcome Group::await(GroupOperation& operation, Deadline deadline, LanguageRuntime& language,
                            bool& interrupted) {
  DeadlockDetector watch(engine_, std::min(operation.seconds(), deadline.remaining_seconds()), engine_.suspicious_ns());
  const auto awaited = [&]() -> std::optional<Awaited> {
    std::optional<Awaited> found = operation.awaited();
    if (!found) return std::nullopt;  // a queued call has no number yet, and the progress thread may be writing it
    return unless_failed(operation, operation.call(), std::move(found));
  };
  const auto look = [&](const Operation&) { return find_deadlock(watch, operation, awaited, language); };
  WaitPolicy policy = engine_.policy().for_bytes(operation.bytes());
  policy.is_helping = true;
  if (poll(operation, policy) != Progress::kDone) {
    const Released released(language);
    const Operation::Awaiting awaiting(operation);
    WaitBudget budget(policy, deadline);
    std::optional<Failure> end = wait(operation, budget, engine_, language, std::cref(look));
    interrupted = end && end->kind == Failure::Kind::kInterrupted;
    if (interrupted || (end && end->kind == Failure::Kind::kTimeout)) return {};
    if (end) give_up(operation, *std::move(end));
  }
  if (operation.failure() == nullptr) return {.has_completed = true};
  std::optional<Failure> deadlock = watch.announced();
  return {.has_completed = true, .failure = deadlock ? std::move(deadlock) : std::optional(*operation.failure())};
}

// End an operation from the thread that waits for it; one of the queue is at its head.
void Group::give_up(GroupOperation& operation, Failure failure) {
  const std::lock_guard driving(driving_);
  if (operation.is_completed()) return;
  operation.give_up(std::move(failure));
  if (!is_message(operation.call().op)) end_with(operation, *operation.failure());
}

// The call may be running in the progress thread, with this caller's arrays: it has to end first.
void Group::end_interrupted(GroupOperation& operation, LanguageRuntime& language) {
  break_with({.kind = Failure::Kind::kInterrupted}, operation.call());
  const Released released(language);
  while (!operation.is_completed()) engine_.sleep(1'000'000, [&] { return operation.is_completed(); });
}

void Group::finish_turn() {
  ended_.store(sequence_.load(std::memory_order_relaxed), std::memory_order_release);
  busy_.store(false, std::memory_order_release);
  if (queued_.load(std::memory_order_seq_cst) != 0) engine_.kick();
}

std::shared_ptr<GroupOperation> Group::start(Request request, double seconds) {
  const bool is_light = request.descriptor.on_device;
  auto [operation, is_first] = enqueue(std::move(request), seconds);
  leave_to_progress_thread(*operation, !is_light || (is_first && announce(*operation)));
  return operation;
}

std::shared_ptr<GroupOperation> Group::start(Request request, double seconds, LanguageRuntime& language) {
  // A group of one rank waits for nobody: its calls complete when they are issued.
  const bool leaves_it = (engine_.policy().core_to_spare && size() > 1) || queued_.load(std::memory_order_acquire) != 0;
  if (leaves_it && !request.descriptor.on_device) return start(std::move(request), seconds);
  auto [operation, is_first] = enqueue(std::move(request), seconds);
  const Released released(language);
  bool wakes = true;
  if (leaves_it)
    wakes = is_first && announce(*operation);
  else
    run_along(*operation);
  leave_to_progress_thread(*operation, wakes);
  return std::move(operation);
}

// Take part, without waiting, in a call whose bytes a device moves, which costs this thread little. Whether the
// progress thread has to be woken for it then: else the other ranks do that. A call behind others is begun by whoever
// ends those.
bool Group::announce(GroupOperation& operation) {
  std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) return true;
  advance_head(&operation);
  driving.unlock();
  // The progress thread may have looked meanwhile, for the last time before it sleeps.
  return has_missed_look_.exchange(false, std::memory_order_seq_cst) || engine_.uses_sockets() ||
         operation.longest_sleep_ns() != kAnySleepNs;
}

void Group::leave_to_progress_thread(const GroupOperation& operation, bool wakes) {
  if (operation.is_completed()) return;
  engine_.progress().notify();
  if (wakes) engine_.kick();
}

// With the operation, whether nothing was queued before it.
std::pair<std::shared_ptr<GroupOperation>, bool> Group::enqueue(Request request, double seconds) {
  auto operation = std::make_shared<QueuedCall>(*this, std::move(request), seconds);
  const std::lock_guard lock(queue_mutex_);
  // Under the mutex: what is queued after leave() would never end.
  require_usable(operation->call(), queue_.empty() ? nullptr : queue_.back().get());
  operation->record();
  queue_.push_back(operation);
  const bool is_first = queued_.fetch_add(1, std::memory_order_seq_cst) == 0;
  return {std::move(operation), is_first};
}

void Group::run_along(const GroupOperation& operation) {
  WaitPolicy policy = engine_.policy();
  policy.spin_ns = kAlongNs;
  WaitBudget budget(policy);
  const uint32_t known = engine_.news().load(std::memory_order_acquire);
  while (!operation.is_completed()) {
    const Progress progress = advance_queue(&operation);
    if (engine_.news().load(std::memory_order_relaxed) != known) return;
    if (!budget.spend(progress) && progress != Progress::kMoved) return;
  }
}

std::shared_ptr<GroupOperation> Group::start_message(const MessageRequest& request, double seconds) {
  auto operation = std::make_shared<MessageOperation>(*this, request, seconds);
  require_usable(operation->call());
  // Messages of one thread are numbered by their receiver in the order in which they start.
  if (operation->advance() == Progress::kDone) return operation;
  std::vector<std::shared_ptr<GroupOperation>> swept;
  {
    const std::lock_guard lock(queue_mutex_);
    require_usable(operation->call());
    if (messages_.size() >= crowded_) swept = sweep_messages();
    messages_.push_back(operation);
  }
  may_rest(*operation) ? engine_.progress().notify_soon() : engine_.progress().notify();
  // What sleeps on the doorbell is woken by whatever this waits for; on sockets, it has to poll for more.
  if (engine_.uses_sockets()) engine_.kick();
  return operation;
}

std::shared_ptr<GroupOperation> Group::follow(const Descriptor& call, std::shared_ptr<Task> task, double seconds,
                                              bool is_unawaited, std::optional<Recording> recording) {
  if (recording) recording->queue();
  const auto operation =
      std::make_shared<DeviceOperation>(*this, call, std::move(task), seconds, is_unawaited, std::move(recording));
  bool is_watched = false;
  {
    const std::lock_guard lock(queue_mutex_);
    is_watched = !is_completed();  // under the mutex: what is added after leave() would never end
    if (is_watched)
      device_queues_[is_message(call.op) ? std::pair(call.op, call.root) : kCollectives].push_back(operation);
    has_used_device_.store(true, std::memory_order_release);
  }
  if (!is_watched) operation->give_up(*broken());
  engine_.progress().notify();
  return operation;
}

void Group::watch_replays(const Descriptor& call, std::shared_ptr<Task> task, double seconds) {
  {
    const std::lock_guard lock(queue_mutex_);
    if (is_completed()) return;  // under the mutex, as in follow()
    captured_.push_back({call, std::move(task), seconds});
    engine_.record().set_replays(options_.id, replays_);
    has_used_device_.store(true, std::memory_order_release);
  }
  engine_.progress().notify();
}

// Follow the calls of graphs that have begun to run for long, and forget those whose graphs are gone. Whether there are
// any.
bool Group::follow_replays() {
  std::vector<std::shared_ptr<Task>> gone;  // let go of without the mutex: that may run Python
  const std::lock_guard lock(queue_mutex_);
  if (captured_.empty()) return false;
  std::vector<int> ignored;
  RunningReplays running{.are_all = true};
  for (CapturedCall& one : captured_) {
    if (is_completed()) break;
    Task::State state = Task::State::kQueued;  // what it throws here, it throws again when it is followed
    failure_of([&] { state = one.task->test(ignored); });
    if (state == Task::State::kCompleted) gone.push_back(one.task);
    if (state == Task::State::kPending) running.are_all = false;
    if (state == Task::State::kQueued) running.calls.push_back(one.call.sequence);
    const std::shared_ptr<GroupOperation> followed = one.followed.lock();
    if (state != Task::State::kQueued || (followed && !followed->is_completed())) continue;
    const auto operation =
        std::make_shared<DeviceOperation>(*this, one.call, one.task, one.seconds, true, std::optional<Recording>());
    one.followed = operation;
    device_queues_[kReplays].push_back(operation);
  }
  std::erase_if(captured_, [&](const CapturedCall& one) { return std::ranges::find(gone, one.task) != gone.end(); });
  if (is_completed()) running = {};  // their end may be that of the group
  if (running != replays_) engine_.record().set_replays(options_.id, replays_ = std::move(running));
  return !captured_.empty() && !is_completed();
}

// Of collectives: a barrier does not wait for messages.
bool Group::has_device_work() {
  if (!has_used_device_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(queue_mutex_);
  const auto queue = device_queues_.find(kCollectives);
  return queue != device_queues_.end() && !queue->second.empty();
}

// Queued calls count, because another rank may have seen the agreement on them already. Calls in graphs do not, because
// the program may launch a graph at any time.
bool Group::has_unfinished_device_calls() {
  advance_devices();
  const std::lock_guard lock(queue_mutex_);
  const auto goes_on = [](const auto& one) {
    return one.first != kReplays &&
           std::ranges::any_of(one.second, [](const auto& call) { return !call->is_completed(); });
  };
  return std::ranges::any_of(queue_, [](const auto& one) { return one->call_so_far().on_device; }) ||
         std::ranges::any_of(device_queues_, goes_on);
}

int64_t Group::longest_sleep_ns() {
  const std::lock_guard lock(queue_mutex_);
  int64_t longest = queue_.empty() ? kAnySleepNs : queue_.front()->longest_sleep_ns();
  if (!captured_.empty()) longest = std::min(longest, DeviceOperation::kSleepNs);
  for (const std::shared_ptr<MessageOperation>& message : messages_)
    longest = std::min(longest, message->longest_sleep_ns());
  for (const auto& [key, queue] : device_queues_)
    if (!queue.empty()) longest = std::min(longest, DeviceOperation::kSleepNs);
  return longest;
}

// No sender waits for the receive of a small message, and its own caller moves it along when he waits for it.
bool Group::may_rest(const GroupOperation& message) {
  const Descriptor call = message.call();
  return call.op == OpKind::kRecv && !call.external && is_small_message(call) && !message.is_watched();
}

// The completed messages, which the caller releases without the mutex: that may run Python.
std::vector<std::shared_ptr<GroupOperation>> Group::sweep_messages() {
  const auto completed = std::stable_partition(messages_.begin(), messages_.end(),
                                               [](const auto& message) { return !message->is_completed(); });
  std::vector<std::shared_ptr<GroupOperation>> swept(completed, messages_.end());
  messages_.erase(completed, messages_.end());
  if (!swept.empty()) engine_.completed();
  crowded_ = std::max(kFewMessages, 2 * messages_.size());
  return swept;
}

bool Group::is_idle() {
  const std::lock_guard lock(queue_mutex_);
  return queue_.empty() && std::ranges::all_of(messages_, [](const auto& one) { return one->is_completed(); }) &&
         std::ranges::all_of(device_queues_, [](const auto& one) { return one.second.empty(); });
}

std::optional<size_t> Group::open_receives(const Operation& waited, const std::vector<int>& awaited) {
  const std::lock_guard lock(queue_mutex_);
  if (!queue_.empty() && queue_.front().get() != &waited) return std::nullopt;
  for (const auto& [key, queue] : device_queues_)
    if (!queue.empty() && queue.front().get() != &waited) return std::nullopt;
  size_t open = 0;
  for (const std::shared_ptr<MessageOperation>& message : messages_) {
    if (message->is_completed() || message.get() == &waited) continue;
    const GroupOperation::Beside beside = message->beside(awaited);
    if (beside == GroupOperation::Beside::kAnything) return std::nullopt;
    if (beside == GroupOperation::Beside::kOpenReceive) ++open;
  }
  return open;
}

bool Group::note_pending() {
  const std::lock_guard lock(queue_mutex_);
  const uint64_t before = std::exchange(looked_at_, message_sequence_.load(std::memory_order_relaxed));
  if (std::ranges::any_of(device_queues_, [](const auto& one) { return !one.second.empty(); })) return true;
  return !queue_.empty() || std::ranges::any_of(messages_, [&](const auto& message) {
    return !message->is_completed() && (message->call().sequence <= before || !may_rest(*message));
  });
}

Progress Group::advance_pending() {
  const Progress queue = advance_queue();
  const Progress messages = advance_messages();
  const Progress devices = advance_devices();
  const auto is_any = [&](Progress one) { return queue == one || messages == one || devices == one; };
  return is_any(Progress::kMoved)     ? Progress::kMoved
         : is_any(Progress::kWaiting) ? Progress::kWaiting
                                      : Progress::kDone;
}

// Only one thread at a time takes from the queue, so its head stays the head while it is advanced.
Progress Group::advance_queue(const GroupOperation* own) {
  std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) {
    has_missed_look_.store(true, std::memory_order_seq_cst);  // see announce(), which has the lock when this one fails
    if (!driving.try_lock()) return Progress::kWaiting;
  }
  return advance_head(own);
}

// With driving_. Nobody waits yet for a call that this thread issues, `own`.
Progress Group::advance_head(const GroupOperation* own) {
  std::shared_ptr<GroupOperation> head;
  {
    const std::lock_guard lock(queue_mutex_);
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
    const std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    queued_.fetch_sub(1, std::memory_order_seq_cst);
  }
  head_has_turn_ = false;
  finish_turn();
  if (head.get() != own) engine_.completed();
  return Progress::kMoved;
}

bool Group::has_turn(const GroupOperation& operation) {
  const std::lock_guard lock(queue_mutex_);
  return head_has_turn_ && !queue_.empty() && queue_.front().get() == &operation;
}

// A call whose deadline passed before its turn has no number: it would have had the next one.
void Group::end_with(const GroupOperation& operation, const Failure& failure) {
  Descriptor call = operation.call();
  if (call.sequence == 0) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  break_with(failure, call);
}

Progress Group::advance_messages() {
  std::vector<std::shared_ptr<MessageOperation>> running;
  {
    const std::lock_guard lock(queue_mutex_);
    running = messages_;
  }
  if (running.empty()) return Progress::kDone;
  Progress progress = Progress::kWaiting;
  bool has_any_completed = false;
  bool looks = true;  // at all channels: a look that finds nothing is enough for all messages
  for (const std::shared_ptr<MessageOperation>& message : running) {
    const Progress one = message->advance(looks);
    if (one != Progress::kWaiting) progress = Progress::kMoved;
    has_any_completed = has_any_completed || one == Progress::kDone;
  }
  std::vector<std::shared_ptr<GroupOperation>> swept;
  if (has_any_completed) {
    const std::lock_guard lock(queue_mutex_);
    swept = sweep_messages();
  }
  return progress;
}

Progress Group::advance_devices() {
  if (!has_used_device_.load(std::memory_order_acquire)) return Progress::kDone;
  Progress progress = follow_replays() ? Progress::kWaiting : Progress::kDone;
  std::vector<std::shared_ptr<GroupOperation>> completed;  // which may run Python when they end
  std::vector<std::pair<OpKind, int>> keys;
  {
    const std::lock_guard lock(queue_mutex_);
    for (const auto& [key, queue] : device_queues_)
      if (!queue.empty()) keys.push_back(key);
  }
  for (const auto& key : keys) {
    for (;;) {
      std::shared_ptr<GroupOperation> first;
      {
        const std::lock_guard lock(queue_mutex_);
        auto& queue = device_queues_[key];
        if (!completed.empty() && !queue.empty() && queue.front() == completed.back()) queue.pop_front();
        if (queue.empty()) break;
        first = queue.front();
      }
      if (first->advance() != Progress::kDone) {
        if (progress == Progress::kDone) progress = Progress::kWaiting;
        break;
      }
      progress = Progress::kMoved;
      completed.push_back(std::move(first));
    }
  }
  if (!completed.empty()) engine_.completed();
  return progress;
}

void Group::examine_pending() {
  const std::lock_guard driving(driving_);
  std::vector<std::shared_ptr<GroupOperation>> running;
  std::vector<std::shared_ptr<GroupOperation>> waiting;  // for their turn: to advance them would start them
  {
    const std::lock_guard lock(queue_mutex_);
    running.assign(messages_.begin(), messages_.end());
    // Those behind the first end after it, but for their deadlines and the end of the group.
    for (const auto& [key, queue] : device_queues_)
      for (const std::shared_ptr<GroupOperation>& work : queue)
        if (work == queue.front() || is_completed() || work->deadline().passed()) running.push_back(work);
    waiting.assign(queue_.begin(), queue_.end());
  }
  std::vector<int> missing;  // to the first of them, so to those behind it too
  if (head_has_turn_ && !waiting.empty()) {
    missing = waiting.front()->missing();
    if (!waiting.front()->is_completed()) record_awaited(waiting.front()->call(), missing);
    running.push_back(std::move(waiting.front()));
    waiting.erase(waiting.begin());
  }
  for (const std::shared_ptr<GroupOperation>& operation : running) {
    std::optional<Failure> failure = operation->is_completed() ? std::nullopt : what_ends(*operation);
    if (!failure)
      operation->budget().restore();
    else if (!operation->budget().extend(operation->advance()) && !operation->is_completed())
      operation->give_up(std::move(*failure));
    // Receives may be posted long before they are needed: they count once a thread waits for them.
    if (!operation->is_completed() && (!is_message(operation->call().op) || operation->is_awaited()))
      report_wait(operation->wait_report(), *operation, operation->call(), operation->deadline().remaining_seconds());
  }
  for (const std::shared_ptr<GroupOperation>& operation : waiting) {
    std::optional<Failure> failure = operation->is_completed() ? std::nullopt : what_ends(*operation);
    if (!failure) continue;
    if (failure->kind == Failure::Kind::kTimeout) {
      failure->missing = missing;
      explain(*failure);
    }
    add_own_wait(*failure, missing);
    operation->give_up(std::move(*failure));
  }
}

std::optional<Failure> Group::what_ends(const GroupOperation& operation) {
  if (std::optional<Failure> failure = examine(operation, operation.call())) return failure;
  if (!operation.deadline().passed()) return std::nullopt;
  Failure timeout{.kind = Failure::Kind::kTimeout, .seconds = operation.seconds(), .missing = operation.missing()};
  if (operation.is_replay()) {
    look_at_replays(timeout, operation.call());
    // The replays of a rank that has ended the group meanwhile have ended, too.
    if (std::optional<Failure> failure = examine(operation, operation.call())) return failure;
  }
  if (operation.waits_in_chain() || (timeout.missing.empty() && operation.outlives_peer())) {
    std::vector<int> stopped = stopped_members();
    if (!stopped.empty()) timeout.missing = std::move(stopped);
  }
  name_relays(timeout, operation.call());
  if (timeout.calls.empty()) explain(timeout);
  return timeout;
}

void Group::number(Descriptor& call) {
  call.group = options_.id;
  call.ordered = ordered_ && reduces(call.op);
  call.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool Group::takes_iovecs(const Descriptor& call) const {
  const bool copies_once = call.op == OpKind::kBroadcast || call.op == OpKind::kAllGather;
  return copies_once && !is_small(*state_, call);
}

bool Group::is_announced_whole(const Descriptor& call) const { return is_inline(*state_, call); }

const char* Group::last_schedule() const {
  if (!state_) return "";
  const bool is_large = state_->chosen.sequence == sequence_.load(std::memory_order_relaxed);
  return is_large ? state_->chosen.name : "small";
}

// A call that fails before its turn ends the group when that comes.
void Group::require_usable(Descriptor call, const GroupOperation* last_queued) {
  std::optional<Failure> ended = broken();
  if (!ended && last_queued && last_queued->is_completed() && last_queued->failure())
    ended = Failure{.kind = Failure::Kind::kBroken, .reason = last_queued->failure()->summary(&global_ranks_)};
  if (!ended) return;
  if (call.sequence == 0) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  throw reported(*std::move(ended), call);
}

// A call that fails ends the group. No caller waits for it, or the program may make another call before it does.
void Group::keep_unreported(Failure failure, Descriptor call, bool is_unawaited) {
  if (failure.kind == Failure::Kind::kAborted) return;
  if (call.sequence == 0 && !is_message(call.op)) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  const std::lock_guard lock(reason_mutex_);
  if (is_kept(call)) is_unawaited_ = is_unawaited_ || is_unawaited;
  if (reason_ || is_reported_) return;
  unreported_ = OperationFailed{std::move(failure), call};
  is_unawaited_ = is_unawaited;
}

bool Group::is_kept(const Descriptor& call) const {
  return unreported_ && unreported_->call.sequence == call.sequence && unreported_->call.op == call.op;
}

void Group::set_reported(const Descriptor& call) {
  const std::lock_guard lock(reason_mutex_);
  if (!is_kept(call)) return;
  unreported_.reset();
  is_reported_ = true;
}

OperationFailed Group::reported(Failure failure, const Descriptor& call) {
  const bool is_consequence = failure.kind == Failure::Kind::kBroken || failure.kind == Failure::Kind::kLost ||
                              failure.kind == Failure::Kind::kFailed;
  if (!is_consequence) {
    set_reported(call);
    return {std::move(failure), call};
  }
  // Of a group that has ended the first is known; and who asks then may hold the mutex of the queue.
  const bool has_ended = failure.kind == Failure::Kind::kBroken;
  const std::optional<Descriptor> earlier = has_ended ? std::nullopt : first_unawaited();
  const std::lock_guard lock(reason_mutex_);
  const bool was_reported = std::exchange(is_reported_, true);
  if (std::optional<OperationFailed> unreported = std::exchange(unreported_, std::nullopt))
    return *std::move(unreported);
  const bool is_of_earlier = earlier && !was_reported;
  failure.wrote = failure.wrote || is_of_earlier;  // whose work on the device may have begun
  return {std::move(failure), is_of_earlier ? *earlier : call};
}

// The first call that has not ended and that nobody waits for: what ends the calls behind it ends it, too.
std::optional<Descriptor> Group::first_unawaited() {
  const std::lock_guard lock(queue_mutex_);
  const auto devices = device_queues_.find(kCollectives);
  const bool is_on_device = devices != device_queues_.end() && !devices->second.empty();
  if (!is_on_device && queue_.empty()) return std::nullopt;
  const GroupOperation& first = is_on_device ? *devices->second.front() : *queue_.front();
  if (!first.is_unawaited()) return std::nullopt;
  Descriptor call = first.call_so_far();
  if (call.sequence == 0) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  return call;
}

int Group::group_rank(int world_rank) const {
  const auto found = std::find(options_.members.begin(), options_.members.end(), world_rank);
  return found == options_.members.end() ? -1 : static_cast<int>(found - options_.members.begin());
}

Descriptor Group::describe(const MessageRequest& request) {
  Descriptor call;
  call.sequence = message_sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  call.group = options_.id;
  call.op = request.op;
  call.dtype = request.dtype;
  call.count = request.count;
  call.root = request.peer;
  call.external = request.external;
  call.on_device = request.on_device;
  return call;
}

}  // namespace procgroup
