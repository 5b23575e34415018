#include "group/message_queue.hpp"

#include <algorithm>

#include "base/diagnostics.hpp"
#include "base/processor.hpp"
#include "base/ticks.hpp"
#include "group/group.hpp"

namespace procgroup {

// A small message that can go, or comes while nobody pauses for long, makes no operation: see Messages::send_at_once.
std::optional<int> MessageQueue::try_at_once(const MessageRequest& request, int looks) {
  if (request.task || group_.end().is_completed()) return std::nullopt;
  const uint64_t started = kDiagnoses ? now_ticks() : 0;
  MessageRequest tried{request.op, request.data, request.count, request.dtype, request.peer, request.tag};
  AtOnce became;
  {
    const std::unique_lock lock(group_.engine().messages_mutex(), std::try_to_lock);
    if (!lock) return std::nullopt;
    for (;;) {
      became = request.peer == kAnySource ? try_receive_from_any(tried) : try_message(tried);
      if (became != AtOnce::kNotYet || --looks <= 0) break;
      cpu_pause();
    }
  }
  if (became != AtOnce::kDone) return std::nullopt;
  if (request.after) request.after();
  group_.engine().recorder().record(describe(request), started, request.source);
  return tried.peer;
}

// To wait a moment for a message takes less time than to post receives: those that follow a posted one have to be
// posted, too. A program that starts its receives long before their messages come is not to wait for each: a receive
// that has to be posted takes one of the few credits, a message that came gives one.
std::optional<int> MessageQueue::start_at_once(const MessageRequest& request) {
  if (request.op != OpKind::kRecv) return try_at_once(request);
  const int credits = receive_credits_.load(std::memory_order_relaxed);
  const bool waits = credits > 0 && group_.engine().policy().held_polls() > 0;
  const std::optional<int> came = try_at_once(request, waits ? kReceivePolls : 1);
  const int left = came ? std::min(credits + 1, kReceiveCredits) : std::max(credits - 1, 0);
  if (left != credits) receive_credits_.store(left, std::memory_order_relaxed);
  return came;
}

AtOnce MessageQueue::try_message(const MessageRequest& request) {
  Messages& messages = group_.engine().messages();
  const int peer = group_.world_rank(request.peer);
  const MessageKey key{group_.id(), request.tag};
  const size_t bytes = request.count * dtype_size(request.dtype);
  const ElementType type = element_type(request.dtype);
  if (request.op == OpKind::kRecv) return messages.receive_at_once(peer, key, request.data, bytes, type);
  return messages.send_at_once(peer, key, request.data, bytes, type) ? AtOnce::kDone : AtOnce::kNot;
}

// The member behind the one that was found last is looked at first: one that sends much does not keep others waiting.
AtOnce MessageQueue::try_receive_from_any(MessageRequest& request) {
  for (int number = 0; number < group_.size(); ++number) {
    request.peer = (looked_first_at_ + number) % group_.size();
    if (request.peer == group_.rank()) continue;
    const AtOnce became = try_message(request);
    if (became == AtOnce::kDone) looked_first_at_ = request.peer + 1;
    if (became != AtOnce::kNotYet) return became;
  }
  return AtOnce::kNotYet;
}

// Of a receive that fails: the messages of that sender that have come with other tags. With the mutex of messages.
std::string MessageQueue::unread(const MessageRequest& request) const {
  if (request.op != OpKind::kRecv || request.external || request.peer == kAnySource) return "";
  const auto name = [](uint64_t tag) {
    return tag < kFirstOwnTag ? "tag " + std::to_string(tag) : std::string("an object or a message of procgroup's own");
  };
  std::vector<uint64_t> tags = group_.engine().messages().unread_tags(group_.world_rank(request.peer), group_.id());
  std::erase_if(tags, [&](uint64_t tag) { return tag == request.tag || tag >> 63 != 0; });
  if (tags.empty()) return "";
  const bool is_own = tags.front() >= kFirstOwnTag;
  return "a message from " + rank_name(request.peer, &group_.members().global_ranks()) +
         " is unread: " + (is_own ? "" : "it has ") + name(tags.front()) + ", and this call awaits " +
         name(request.tag);
}

int MessageQueue::run(const MessageRequest& request, double seconds, LanguageRuntime& language) {
  const WaitPolicy& policy = group_.engine().policy();
  const int looks = policy.oversubscribed || !policy.hold_lock ? 1 : kHeldPolls;
  if (const std::optional<int> peer = try_at_once(request, looks)) return request.op == OpKind::kRecv ? *peer : -1;
  MessageOperation operation(group_, request, seconds);
  group_.calls().require_usable(operation.call());
  auto failure =
      group_.watch().complete(operation, operation.call(), [&] { return operation.awaited(); }, seconds, language);
  if (!failure) return operation.source();
  {
    const std::lock_guard lock(group_.engine().messages_mutex());
    failure->note = unread(request);
  }
  throw group_.end().reported(*std::move(failure), operation.call());
}

std::shared_ptr<GroupOperation> MessageQueue::start(const MessageRequest& request, double seconds) {
  auto operation = std::make_shared<MessageOperation>(group_, request, seconds);
  group_.calls().require_usable(operation->call());
  // Messages of one thread are numbered by their receiver in the order in which they start.
  if (operation->advance() == Progress::kDone) return operation;
  std::vector<std::shared_ptr<GroupOperation>> swept;
  {
    const std::lock_guard lock(mutex_);
    group_.calls().require_usable(operation->call());
    if (messages_.size() >= crowded_) swept = sweep();
    messages_.push_back(operation);
  }
  may_rest(*operation) ? group_.engine().progress().notify_soon() : group_.engine().progress().notify();
  // What sleeps on the doorbell is woken by whatever this waits for; on sockets, it has to poll for more.
  if (group_.engine().uses_sockets()) group_.engine().kick();
  return operation;
}

// No sender waits for the receive of a small message, and its own caller moves it along when he waits for it.
bool MessageQueue::may_rest(const GroupOperation& message) {
  const Descriptor call = message.call();
  return call.op == OpKind::kRecv && !call.external && is_small_message(call) && !message.is_watched();
}

// The completed messages, which the caller releases without the mutex: that may run Python.
std::vector<std::shared_ptr<GroupOperation>> MessageQueue::sweep() {
  const auto completed = std::stable_partition(messages_.begin(), messages_.end(),
                                               [](const auto& message) { return !message->is_completed(); });
  std::vector<std::shared_ptr<GroupOperation>> swept(completed, messages_.end());
  messages_.erase(completed, messages_.end());
  if (!swept.empty()) group_.engine().completed();
  crowded_ = std::max(kFewMessages, 2 * messages_.size());
  return swept;
}

Progress MessageQueue::advance() {
  std::vector<std::shared_ptr<MessageOperation>> running;
  {
    const std::lock_guard lock(mutex_);
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
    const std::lock_guard lock(mutex_);
    swept = sweep();
  }
  return progress;
}

Descriptor MessageQueue::describe(const MessageRequest& request) {
  Descriptor call;
  call.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  call.group = group_.id();
  call.op = request.op;
  call.dtype = request.dtype;
  call.count = request.count;
  call.root = request.peer;
  call.external = request.external;
  call.on_device = request.on_device;
  return call;
}

bool MessageQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(messages_, [](const auto& one) { return one->is_completed(); });
}

int64_t MessageQueue::longest_sleep_ns() const {
  const std::lock_guard lock(mutex_);
  int64_t longest = kAnySleepNs;
  for (const std::shared_ptr<MessageOperation>& message : messages_)
    longest = std::min(longest, message->longest_sleep_ns());
  return longest;
}

bool MessageQueue::note_pending() {
  const std::lock_guard lock(mutex_);
  const uint64_t before = std::exchange(looked_at_, sequence_.load(std::memory_order_relaxed));
  return std::ranges::any_of(messages_, [&](const auto& message) {
    return !message->is_completed() && (message->call().sequence <= before || !may_rest(*message));
  });
}

std::optional<size_t> MessageQueue::open_receives(const Operation& waited, const std::vector<int>& awaited) const {
  const std::lock_guard lock(mutex_);
  size_t open = 0;
  for (const std::shared_ptr<MessageOperation>& message : messages_) {
    if (message->is_completed() || message.get() == &waited) continue;
    const GroupOperation::Beside beside = message->beside(awaited);
    if (beside == GroupOperation::Beside::kAnything) return std::nullopt;
    if (beside == GroupOperation::Beside::kOpenReceive) ++open;
  }
  return open;
}

std::vector<std::shared_ptr<GroupOperation>> MessageQueue::pending() const {
  const std::lock_guard lock(mutex_);
  return {messages_.begin(), messages_.end()};
}

// Messages of one sender, receiver and tag move in the order in which they started. Headers arrive in this order, and
// each is matched to the first receive that fits: so an earlier receive that could take a message of this sender has
// one.
bool MessageQueue::has_turn(const MessageOperation& message) const {
  return *std::ranges::find_if(external_, [&](const auto* one) { return one->shares_order(message); }) == &message;
}

uint64_t MessageQueue::number_matched(int sender) {
  const auto index = static_cast<size_t>(sender);
  matched_.resize(std::max(matched_.size(), index + 1));
  return matched_[index]++;
}

}  // namespace procgroup
