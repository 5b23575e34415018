#include "messages/matching.hpp"

#include <algorithm>
#include <utility>

namespace procgroup {
namespace {

// Bytes of one unexpected message beside its payload: its record and its share of the queue. Counting them bounds a
// flood of empty messages too.
constexpr size_t kRecordBytes = 128;

size_t cost(const UnexpectedMessage& message) { return message.payload.size() + kRecordBytes; }

}  // namespace

void Matching::post(std::shared_ptr<ReceiveTransfer> receive) { posted_[receive->key].push_back(std::move(receive)); }

std::shared_ptr<ReceiveTransfer> Matching::take_posted(MessageKey key, int source) {
  const auto found = posted_.find(key);
  if (found == posted_.end()) return nullptr;
  auto& queue = found->second;
  const auto place =
      std::find_if(queue.begin(), queue.end(), [&](const auto& receive) { return receive->accepts(source); });
  if (place == queue.end()) return nullptr;
  std::shared_ptr<ReceiveTransfer> receive = std::move(*place);
  queue.erase(place);
  if (queue.empty()) posted_.erase(found);
  return receive;
}

bool Matching::awaits(int source) const {
  if (expected_[static_cast<size_t>(source)] != 0) return true;
  const auto accepts = [source](const auto& receive) { return receive->accepts(source); };
  return std::any_of(posted_.begin(), posted_.end(), [&](const auto& entry) {
    // Keys of no group have listeners all the time.
    return entry.first.group != 0 && std::any_of(entry.second.begin(), entry.second.end(), accepts);
  });
}

void Matching::remove_posted(const ReceiveTransfer& receive) {
  const auto found = posted_.find(receive.key);
  if (found == posted_.end()) return;
  std::erase_if(found->second, [&](const auto& posted) { return posted.get() == &receive; });
  if (found->second.empty()) posted_.erase(found);
}

std::vector<std::shared_ptr<ReceiveTransfer>> Matching::take_posted_if(
    const std::function<bool(const ReceiveTransfer&)>& holds) {
  std::vector<std::shared_ptr<ReceiveTransfer>> taken;
  for (auto& [key, queue] : posted_) {
    for (const auto& receive : queue) {
      if (holds(*receive)) taken.push_back(receive);
    }
    std::erase_if(queue, [&](const auto& receive) { return holds(*receive); });
  }
  std::erase_if(posted_, [](const auto& entry) { return entry.second.empty(); });
  return taken;
}

void Matching::keep(UnexpectedMessage message) {
  if (const auto found = listeners_.find(message.key); found != listeners_.end() && !message.announced)
    return found->second(message.source, message.payload);
  kept_bytes_[static_cast<size_t>(message.source)] += cost(message);
  unexpected_[message.key].push_back(std::move(message));
}

void Matching::listen(MessageKey key, Listener listener) {
  listeners_.erase(key);
  if (!listener) return;
  const Listener& registered = listeners_.emplace(key, std::move(listener)).first->second;
  const auto kept = unexpected_.find(key);
  if (kept == unexpected_.end()) return;
  for (const UnexpectedMessage& message : kept->second) registered(message.source, message.payload);
  forget_if(kept->second, [](const UnexpectedMessage&) { return true; });
  unexpected_.erase(kept);
}

std::optional<UnexpectedMessage> Matching::take_unexpected(const ReceiveTransfer& receive) {
  const auto found = unexpected_.find(receive.key);
  if (found == unexpected_.end()) return std::nullopt;
  auto& queue = found->second;
  const auto place = std::find_if(queue.begin(), queue.end(),
                                  [&](const UnexpectedMessage& message) { return receive.accepts(message.source); });
  if (place == queue.end()) return std::nullopt;
  UnexpectedMessage message = std::move(*place);
  queue.erase(place);
  if (queue.empty()) unexpected_.erase(found);
  kept_bytes_[static_cast<size_t>(message.source)] -= cost(message);
  return message;
}

std::vector<uint64_t> Matching::unread_tags(int source, uint64_t group) const {
  std::vector<uint64_t> tags;
  for (const auto& [key, queue] : unexpected_)
    if (key.group == group && std::ranges::find(queue, source, &UnexpectedMessage::source) != queue.end())
      tags.push_back(key.tag);
  std::ranges::sort(tags);
  return tags;
}

void Matching::forget_if(std::deque<UnexpectedMessage>& queue,
                         const std::function<bool(const UnexpectedMessage&)>& holds) {
  std::erase_if(queue, [&](const UnexpectedMessage& message) {
    if (!holds(message)) return false;
    kept_bytes_[static_cast<size_t>(message.source)] -= cost(message);
    return true;
  });
}

void Matching::forget_announced(int source, MessageKey key, uint64_t number) {
  const auto found = unexpected_.find(key);
  if (found == unexpected_.end()) return;
  forget_if(found->second, [&](const UnexpectedMessage& message) {
    return message.announced && message.source == source && message.number == number;
  });
  if (found->second.empty()) unexpected_.erase(found);
}

void Matching::forget_all_announced(int source) {
  for (auto& [key, queue] : unexpected_) {
    forget_if(queue, [&](const UnexpectedMessage& message) { return message.announced && message.source == source; });
  }
  std::erase_if(unexpected_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace procgroup
