#include "liveness/wait_edge.hpp"

#include <algorithm>
#include <cstring>

#include "runtime/failure.hpp"

namespace procgroup {

std::string WaitEdge::describe(bool with_tag) const {
  const std::string name = op_name(op);
  const std::string at = line.empty() ? "" : " at " + line;
  const std::string awaited = ", waiting for rank " + std::to_string(next);
  if (op == kMakesGroup) return name + awaited + at;
  if (!is_message()) return name + " #" + std::to_string(number) + awaited + at;
  // The line says which function of procgroup has a tag of its own.
  const bool is_named = number < kFirstOwnTag && (with_tag || number != 0);
  const std::string tag = is_named ? " with tag " + std::to_string(number) : "";
  return name + (op == OpKind::kSend ? " to " : " from ") + std::to_string(next) + tag + at;
}

void WaitEdgeBoard::write(Entry& entry, const WaitEdge& wait) {
  const uint64_t ranks = uint64_t{static_cast<uint32_t>(wait.rank)} << 32 | static_cast<uint32_t>(wait.next);
  entry.ranks.store(ranks, std::memory_order_release);
  entry.op.store(static_cast<uint64_t>(wait.op), std::memory_order_release);
  entry.number.store(wait.number, std::memory_order_release);
  entry.epoch.store(wait.epoch, std::memory_order_release);
  uint64_t words[kLineWords] = {};
  std::memcpy(words, wait.line.data(), std::min(wait.line.size(), sizeof words));
  for (size_t at = 0; at < kLineWords; ++at) entry.line[at].store(words[at], std::memory_order_release);
}

WaitEdge WaitEdgeBoard::read(const Entry& entry) {
  const uint64_t ranks = entry.ranks.load(std::memory_order_acquire);
  uint64_t words[kLineWords];
  for (size_t at = 0; at < kLineWords; ++at) words[at] = entry.line[at].load(std::memory_order_acquire);
  return {.rank = static_cast<int>(ranks >> 32),
          .next = static_cast<int>(static_cast<uint32_t>(ranks)),
          .op = static_cast<OpKind>(entry.op.load(std::memory_order_acquire) & 0xff),
          .number = entry.number.load(std::memory_order_acquire),
          .epoch = entry.epoch.load(std::memory_order_acquire),
          .line = readable(reinterpret_cast<const char*>(words), sizeof words)};
}

void WaitEdgeBoard::show(const WaitEdge& wait) {
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed);
  write(wait, 0, epoch + 1, epoch + 2);
}

void WaitEdgeBoard::copy(const WaitEdge& wait, uint64_t confirmed) {
  write(wait, confirmed, wait.epoch + 1, wait.epoch);
}

void WaitEdgeBoard::write(const WaitEdge& wait, uint64_t confirmed, uint64_t meanwhile, uint64_t epoch) {
  epoch_.store(meanwhile, std::memory_order_release);
  confirmed_.store(confirmed, std::memory_order_release);
  write(wait_, wait);
  shown_.store(1, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_seq_cst);
}

void WaitEdgeBoard::hide() {
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed);
  epoch_.store(epoch + 1, std::memory_order_release);
  shown_.store(0, std::memory_order_release);
  // Sequentially consistent: what this rank does next is not seen before it.
  epoch_.store(epoch + 2, std::memory_order_seq_cst);
}

std::optional<WaitEdge> WaitEdgeBoard::wait(int rank) const {
  const uint64_t before = epoch();
  if (before % 2 != 0 || shown_.load(std::memory_order_acquire) == 0) return std::nullopt;
  WaitEdge wait = read(wait_);
  if (epoch() != before || !can_wait(wait.op)) return std::nullopt;
  wait.rank = rank;
  wait.epoch = before;
  return wait;
}

void WaitEdgeBoard::announce(const std::vector<WaitEdge>& cycle) {
  const uint64_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_release);
  const size_t members = std::min(cycle.size(), kMembers);
  members_.store(members, std::memory_order_release);
  for (size_t index = 0; index < members; ++index) write(cycle_[index], cycle[index]);
  version_.store(version + 2, std::memory_order_release);
}

std::vector<WaitEdge> WaitEdgeBoard::verdict() const {
  const uint64_t before = version_.load(std::memory_order_acquire);
  const uint64_t members = members_.load(std::memory_order_acquire);
  if (before == 0 || before % 2 != 0 || members > kMembers) return {};
  std::vector<WaitEdge> cycle;
  for (size_t index = 0; index < members; ++index) {
    cycle.push_back(read(cycle_[index]));
    if (!can_wait(cycle.back().op)) return {};  // a peer wrote it
  }
  if (version_.load(std::memory_order_acquire) != before) return {};
  return cycle;
}

}  // namespace procgroup
