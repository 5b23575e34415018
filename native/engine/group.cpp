#include "engine/group.hpp"

#include <algorithm>
#include <cstring>

#include "engine/group_operation.hpp"
#include "engine/mesh_operation.hpp"
#include "engine/recording.hpp"

namespace procgroup {
namespace {

// Above two ranks, all_reduce of up to this many bytes lets every rank reduce everything.
constexpr size_t kDirectBytes = 64 * 1024;

}  // namespace

Group::Group(Engine& engine, GroupOptions options) : engine_(engine), options_(std::move(options)) {
  if (options_.shared) offset_ = engine_.arena().allocate(options_.layout.total());
  engine_.progress().add(this);
}

Group::~Group() {
  if (engine_.forked()) return;
  leave();
  if (options_.shared && nobody_reads()) engine_.arena().release(offset_);
}

// Whether no other rank can be reading what this one published last. Else the memory stays until the arena goes.
bool Group::nobody_reads() const {
  if (!shared_) return true;
  for (int member = 0; member < size(); ++member) {
    const GroupMemory& memory = shared_->members[static_cast<size_t>(member)].memory();
    const bool gone = engine_.peer_status(options_.members[static_cast<size_t>(member)]) != PeerStatus::kPresent;
    if (member != rank() && !gone && memory.state.load(std::memory_order_acquire) == MemberState::kPresent)
      return false;
  }
  return true;
}

void Group::attach(const std::vector<uint64_t>& offsets) {
  std::vector<GroupMemoryView> views;
  for (size_t member = 0; member < options_.members.size(); ++member) {
    const Arena* arena = engine_.peer_arena(options_.members[member]);
    arenas_.push_back(arena);
    views.emplace_back(arena->at(offsets.at(member), options_.layout.total()), options_.layout);
  }
  std::vector<const void*> sources(views.size());
  shared_.emplace(SharedState{.rank = options_.rank,
                              .layout = options_.layout,
                              .members = std::move(views),
                              .arenas = &arenas_,
                              .progress = 0,
                              .chunks = 0,
                              .plan = {},
                              .sources = std::move(sources),
                              .direct_bytes = kDirectBytes,
                              .exchanged_bytes = options_.exchanged_bytes});
}

void Group::run(Request& request, double seconds, Host& host) {
  require_usable(request.descriptor);
  const bool idle = queued_.load(std::memory_order_acquire) == 0;
  if (!idle || busy_.exchange(true, std::memory_order_acquire)) return run_queued(request, seconds, host);
  const Turn turn(*this);
  number(request.descriptor);
  Recording recording(engine_.recorder(), request.descriptor);
  if (shared_) {
    SharedCall call(*shared_, request);
    supervise(call, seconds, host);
    recording.end(call.failure());
    if (const Failure* failure = call.failure()) throw OperationFailed{*failure, request.descriptor};
    return;
  }
  const std::unique_ptr<Operation> call = make_call(request);
  supervise(*call, seconds, host);
  recording.end(call->failure());
  if (const Failure* failure = call->failure()) throw OperationFailed{*failure, request.descriptor};
}

void Group::run_queued(const Request& request, double seconds, Host& host) {
  const std::shared_ptr<GroupOperation> operation = start(request, seconds);
  bool interrupted = false;
  await_completion(*operation, Deadline::never(), engine_, host, interrupted);
  if (interrupted) {
    // The call may be running in the progress thread, with this caller's arrays: it has to end first.
    break_with({.kind = Failure::Kind::kInterrupted});
    host.unlock();
    while (!operation->is_over()) engine_.sleep(1'000'000, [&] { return operation->is_over(); });
    host.lock();
    throw OperationFailed{{.kind = Failure::Kind::kInterrupted}, operation->call()};
  }
  if (const Failure* failure = operation->failure()) throw OperationFailed{*failure, operation->call()};
}

void Group::supervise(Operation& operation, double seconds, Host& host) {
  drive(operation, seconds, engine_.policy(), engine_, host,
        [this](const Operation& running) { return examine(running); });
  if (const Failure* failure = operation.failure()) break_with(*failure);
}

void Group::finish_turn() {
  busy_.store(false, std::memory_order_release);
  if (queued_.load(std::memory_order_seq_cst) != 0) engine_.kick();
}

int Group::run_message(const MessageRequest& request, double seconds, Host& host) {
  MessageOperation operation(*this, request, seconds);
  require_usable(operation.call());
  drive(operation, seconds, engine_.policy(), engine_, host,
        [this](const Operation& running) { return examine(running); });
  if (const Failure* failure = operation.failure()) throw OperationFailed{*failure, operation.call()};
  return operation.source();
}

std::shared_ptr<GroupOperation> Group::start(Request request, double seconds) {
  auto operation = std::make_shared<QueuedCall>(*this, std::move(request), seconds);
  {
    const std::lock_guard lock(queue_mutex_);
    require_usable(operation->call());  // under the mutex: what is queued after leave() would never end
    queue_.push_back(operation);
    queued_.fetch_add(1, std::memory_order_seq_cst);
  }
  engine_.progress().notify();
  engine_.kick();
  return operation;
}

std::shared_ptr<GroupOperation> Group::start_message(const MessageRequest& request, double seconds) {
  auto operation = std::make_shared<MessageOperation>(*this, request, seconds);
  require_usable(operation->call());
  // Messages of one thread are numbered by their receiver in the order in which they start.
  if (operation->advance() == Progress::kDone) return operation;
  {
    const std::lock_guard lock(queue_mutex_);
    require_usable(operation->call());
    messages_.push_back(operation);
  }
  engine_.progress().notify();
  engine_.kick();
  return operation;
}

Progress Group::advance_pending() {
  const Progress queue = advance_queue();
  const Progress messages = advance_messages();
  if (queue == Progress::kMoved || messages == Progress::kMoved) return Progress::kMoved;
  return queue == Progress::kWaiting || messages == Progress::kWaiting ? Progress::kWaiting : Progress::kDone;
}

// Only the progress thread takes from the queue, so its head stays the head while it is advanced.
Progress Group::advance_queue() {
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
  if (head->advance() != Progress::kDone) return Progress::kWaiting;
  if (const Failure* failure = head->failure()) break_with(*failure);
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    queued_.fetch_sub(1, std::memory_order_seq_cst);
  }
  head_has_turn_ = false;
  finish_turn();
  engine_.completed();
  return Progress::kMoved;
}

Progress Group::advance_messages() {
  std::vector<std::shared_ptr<GroupOperation>> running;
  {
    const std::lock_guard lock(queue_mutex_);
    running = messages_;
  }
  if (running.empty()) return Progress::kDone;
  Progress progress = Progress::kWaiting;
  for (const std::shared_ptr<GroupOperation>& operation : running) {
    const Progress one = operation->advance();
    if (one != Progress::kWaiting) progress = Progress::kMoved;
    if (one != Progress::kDone) continue;
    {
      const std::lock_guard lock(queue_mutex_);
      std::erase(messages_, operation);
    }
    engine_.completed();
  }
  return progress;
}

void Group::examine_pending() {
  std::vector<std::shared_ptr<GroupOperation>> running;
  std::vector<std::shared_ptr<GroupOperation>> waiting;  // for their turn: to advance them would start them
  {
    const std::lock_guard lock(queue_mutex_);
    running = messages_;
    waiting.assign(queue_.begin(), queue_.end());
  }
  if (head_has_turn_ && !waiting.empty()) {
    running.push_back(std::move(waiting.front()));
    waiting.erase(waiting.begin());
  }
  for (const std::shared_ptr<GroupOperation>& operation : running) {
    std::optional<Failure> failure = operation->is_over() ? std::nullopt : what_ends(*operation);
    if (failure && operation->advance() == Progress::kWaiting) operation->give_up(std::move(*failure));
  }
  for (const std::shared_ptr<GroupOperation>& operation : waiting) {
    std::optional<Failure> failure = operation->is_over() ? std::nullopt : what_ends(*operation);
    if (failure) operation->give_up(std::move(*failure));
  }
}

std::optional<Failure> Group::what_ends(const GroupOperation& operation) const {
  if (std::optional<Failure> failure = examine(operation)) return failure;
  if (!operation.deadline().passed()) return std::nullopt;
  return Failure{.kind = Failure::Kind::kTimeout, .seconds = operation.seconds(), .missing = operation.missing()};
}

void Group::number(Descriptor& call) {
  call.group = options_.id;
  call.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::unique_ptr<Operation> Group::make_call(const Request& request) {
  if (shared_) return std::make_unique<SharedCall>(*shared_, request);
  const GroupView view{.id = options_.id, .rank = options_.rank, .members = options_.members};
  return std::make_unique<MeshOperation>(engine_, view, request);
}

void Group::require_usable(Descriptor call) {
  if (!over_.load(std::memory_order_acquire)) return;
  if (call.sequence == 0) call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  throw OperationFailed{*broken(), call};
}

std::optional<Failure> Group::broken() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

std::optional<Failure> Group::examine(const Operation& operation) const {
  if (engine_.aborted()) return Failure{.kind = Failure::Kind::kAborted};
  const std::vector<int> missing = operation.missing();
  const auto concerns = [&](int member) {
    return member != options_.rank &&
           (operation.depends_on_all() || std::ranges::find(missing, member) != missing.end());
  };
  // A lost rank is the cause of what other ranks report: look for that first.
  for (int member = 0; member < size(); ++member) {
    const int peer = options_.members[static_cast<size_t>(member)];
    if (!concerns(member) || engine_.peer_status(peer) != PeerStatus::kLost) continue;
    Failure failure = engine_.loss(peer);
    failure.peer = member;
    return failure;
  }
  for (int member = 0; member < size(); ++member)
    if (concerns(member))
      if (std::optional<Failure> failure = examine_member(member, missing)) return failure;
  return broken();
}

std::optional<Failure> Group::examine_member(int member, const std::vector<int>& missing) const {
  const bool awaited = std::find(missing.begin(), missing.end(), member) != missing.end();
  const int peer = options_.members[static_cast<size_t>(member)];
  if (awaited && engine_.peer_status(peer) == PeerStatus::kLeft) {
    Failure failure = engine_.loss(peer);
    failure.peer = member;
    return failure;
  }
  if (!shared_) return std::nullopt;
  const GroupMemory& memory = shared_->members[static_cast<size_t>(member)].memory();
  switch (memory.state.load(std::memory_order_acquire)) {
    case MemberState::kPresent:
      return std::nullopt;
    case MemberState::kLeft:
      if (!awaited) return std::nullopt;
      return Failure{.kind = Failure::Kind::kLost,
                     .peer = member,
                     .pid = engine_.peer_arena(peer)->header().pid,
                     .reason = "it left the group before this call"};
    case MemberState::kFailed:
      break;
  }
  const std::string reason(memory.reason, strnlen(memory.reason, kReasonBytes));
  if (memory.lost_rank >= 0 && memory.lost_rank != options_.rank)
    return Failure{.kind = Failure::Kind::kLost, .peer = memory.lost_rank, .pid = memory.lost_pid, .reason = reason};
  return Failure{.kind = Failure::Kind::kFailed, .peer = member, .reason = reason};
}

void Group::break_with(const Failure& failure) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = failure.summary()};
  }
  over_.store(true, std::memory_order_release);
  if (!shared_) return;
  const bool lost = failure.kind == Failure::Kind::kLost;
  GroupMemory& memory = shared_->mine().memory();
  memory.lost_rank = lost ? failure.peer : -1;
  memory.lost_pid = failure.pid;
  const std::string reason = lost ? failure.reason : failure.summary();
  std::strncpy(memory.reason, reason.c_str(), kReasonBytes - 1);
  memory.state.store(MemberState::kFailed, std::memory_order_seq_cst);
  shared_->wake_peers();
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  mark_left();
  // From here on the progress thread does not touch this group: what is pending ends now, and nobody waits for ever.
  engine_.progress().remove(this);
  examine_pending();
  engine_.completed();
}

void Group::mark_left() {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return;
    reason_ = Failure{.kind = Failure::Kind::kBroken, .reason = "this rank left the group"};
  }
  over_.store(true, std::memory_order_release);
  if (!shared_) return;
  shared_->mine().memory().state.store(MemberState::kLeft, std::memory_order_seq_cst);
  shared_->wake_peers();
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
  return call;
}

}  // namespace procgroup
