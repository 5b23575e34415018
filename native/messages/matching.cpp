#include "messages/matching.hpp"

#include <algorithm>
#include <utility>

namespace procgroup {
namespace {

// What one arrival costs beside its payload: its record and its share of the queue. Counting it bounds a
// flood of empty messages too.
constexpr size_t kRecordBytes = 128;

size_t cost(const Arrival& arrival) { return arrival.payload.size() + kRecordBytes; }

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
  const auto accepts = [source](const auto& receive) { return receive->accepts(source); };
  return std::any_of(posted_.begin(), posted_.end(), [&](const auto& entry) {
    // What is of no group is listened for all the time.
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

void Matching::keep(Arrival arrival) {
  if (const auto found = listeners_.find(arrival.key); found != listeners_.end() && !arrival.announced)
    return found->second(arrival.source, arrival.payload);
  kept_bytes_[static_cast<size_t>(arrival.source)] += cost(arrival);
  arrivals_[arrival.key].push_back(std::move(arrival));
}

void Matching::listen(MessageKey key, Listener listener) {
  listeners_.erase(key);
  if (!listener) return;
  const Listener& registered = listeners_.emplace(key, std::move(listener)).first->second;
  const auto kept = arrivals_.find(key);
  if (kept == arrivals_.end()) return;
  for (const Arrival& arrival : kept->second) registered(arrival.source, arrival.payload);
  forget_if(kept->second, [](const Arrival&) { return true; });
  arrivals_.erase(kept);
}

std::optional<Arrival> Matching::take_arrival(const ReceiveTransfer& receive) {
  const auto found = arrivals_.find(receive.key);
  if (found == arrivals_.end()) return std::nullopt;
  auto& queue = found->second;
  const auto place =
      std::find_if(queue.begin(), queue.end(), [&](const Arrival& arrival) { return receive.accepts(arrival.source); });
  if (place == queue.end()) return std::nullopt;
  Arrival arrival = std::move(*place);
  queue.erase(place);
  if (queue.empty()) arrivals_.erase(found);
  kept_bytes_[static_cast<size_t>(arrival.source)] -= cost(arrival);
  return arrival;
}

void Matching::forget_if(std::deque<Arrival>& queue, const std::function<bool(const Arrival&)>& holds) {
  std::erase_if(queue, [&](const Arrival& arrival) {
    if (!holds(arrival)) return false;
    kept_bytes_[static_cast<size_t>(arrival.source)] -= cost(arrival);
    return true;
  });
}

void Matching::forget_announced(int source, MessageKey key, uint64_t number) {
  const auto found = arrivals_.find(key);
  if (found == arrivals_.end()) return;
  forget_if(found->second, [&](const Arrival& arrival) {
    return arrival.announced && arrival.source == source && arrival.number == number;
  });
  if (found->second.empty()) arrivals_.erase(found);
}

void Matching::forget_all_announced(int source) {
  for (auto& [key, queue] : arrivals_) {
    forget_if(queue, [&](const Arrival& arrival) { return arrival.announced && arrival.source == source; });
  }
  std::erase_if(arrivals_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace procgroup
