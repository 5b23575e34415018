#include "messages/outbox.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace procgroup {
namespace {

constexpr int kSmallInARow = 16;
constexpr size_t kTurnBytes = 1024 * 1024;  // written in one turn, so that other connections get theirs
constexpr size_t kStagedBytes = 8 * 1024;   // payload copied beside its header: one system call, one packet

}  // namespace

void Outbox::send(std::shared_ptr<SendTransfer> transfer) {
  FrameHeader header = eager_header(transfer->key, transfer->size, transfer->type);
  if (transfer->size > kEagerBytes) {
    header.kind = FrameKind::kAnnounce;
    header.number = ++last_number_;
    const bool exposes = single_copy_ != nullptr && !transfer->is_scattered();
    Exposure exposure = exposes ? single_copy_->expose(header.number, transfer->data, transfer->size) : Exposure();
    messages_.try_emplace(header.number, transfer, std::move(exposure));
  }
  small_.push_back({header, std::move(transfer)});
}

void Outbox::grant(uint64_t number) { small_.push_back({{.kind = FrameKind::kGrant, .number = number}, nullptr}); }

void Outbox::refuse(uint64_t number, uint64_t capacity) {
  small_.push_back({{.kind = FrameKind::kRefuse, .number = number, .bytes = capacity}, nullptr});
}

void Outbox::take(uint64_t number) { small_.push_back({{.kind = FrameKind::kTaken, .number = number}, nullptr}); }

void Outbox::granted(uint64_t number) {
  const bool already =
      std::find(streams_.begin(), streams_.end(), number) != streams_.end() ||
      (current_.active && current_.header.kind == FrameKind::kData && current_.header.number == number);
  const auto found = messages_.find(number);
  if (already || found == messages_.end()) return;
  found->second.exposure.end();
  streams_.push_back(number);
}

void Outbox::taken(uint64_t number) {
  const auto found = messages_.find(number);
  if (found == messages_.end() || !found->second.exposure.lasts()) return;
  const std::shared_ptr<SendTransfer> transfer = std::move(found->second.transfer);
  messages_.erase(found);
  transfer->finish();
}

void Outbox::refused(uint64_t number, uint64_t capacity) {
  const auto found = messages_.find(number);
  if (found == messages_.end()) return;
  const std::shared_ptr<SendTransfer> transfer = found->second.transfer;
  cancel(*transfer, failed(transfer->peer, "the receiver refused the message of " + std::to_string(transfer->size) +
                                               " bytes: its receive is for other elements or another size (" +
                                               std::to_string(capacity) + " bytes), or was cancelled"));
}

void Outbox::cancel(SendTransfer& transfer, const Failure& failure) {
  const auto carries = [&](const auto& entry) { return entry.transfer.get() == &transfer; };
  const bool unwritten = std::erase_if(small_, carries) > 0;
  if (current_.active && current_.transfer.get() == &transfer) abandon_current();
  const auto found = std::find_if(messages_.begin(), messages_.end(),
                                  [&](const auto& entry) { return entry.second.transfer.get() == &transfer; });
  const std::shared_ptr<SendTransfer> large = found == messages_.end() ? nullptr : found->second.transfer;
  if (large) {
    const uint64_t number = found->first;
    std::erase(streams_, number);
    messages_.erase(found);
    if (!unwritten) small_.push_back({{.kind = FrameKind::kWithdraw, .key = transfer.key, .number = number}, nullptr});
  }
  fail_unless_completed(transfer, failure);
}

void Outbox::fail_all(const Failure& failure) {
  // End the exposures before the sends complete: their users may write into the buffers then.
  for (auto& [number, message] : messages_) message.exposure.end();
  for (const SmallFrame& frame : small_) {
    if (frame.transfer) fail_unless_completed(*frame.transfer, failure);
  }
  for (const auto& [number, message] : messages_) fail_unless_completed(*message.transfer, failure);
  if (current_.transfer) fail_unless_completed(*current_.transfer, failure);
  small_.clear();
  streams_.clear();
  messages_.clear();
  current_ = {};
}

bool Outbox::write(Channel& channel) {
  size_t moved = 0;
  while (moved < kTurnBytes && (current_.active || start_next())) {
    moved += write_current(channel);
    if (current_.active) break;  // the channel is full
  }
  return moved > 0;
}

bool Outbox::start_next() {
  if (!small_.empty() && (streams_.empty() || small_in_a_row_ < kSmallInARow)) {
    SmallFrame frame = std::move(small_.front());
    small_.pop_front();
    ++small_in_a_row_;
    start(frame.header, std::move(frame.transfer), 0);
    return true;
  }
  small_in_a_row_ = 0;
  if (streams_.empty()) return false;
  const uint64_t number = streams_.front();
  streams_.pop_front();
  const LargeMessage& message = messages_.at(number);
  const size_t bytes = std::min(kBulkBytes, message.transfer->size - message.sent);
  start({.kind = FrameKind::kData, .number = number, .bytes = bytes}, message.transfer, message.sent);
  return true;
}

// A scattered payload is copied into one block here, a frame at a time, which stays in cache until it is written.
void Outbox::start(const FrameHeader& header, std::shared_ptr<SendTransfer> transfer, size_t first) {
  const bool carries = header.kind == FrameKind::kEager || header.kind == FrameKind::kData;
  const size_t bytes = carries ? static_cast<size_t>(header.bytes) : 0;
  const std::span<const std::byte> run = carries ? transfer->run(first) : std::span<const std::byte>();
  const size_t beside = run.size() < bytes ? bytes : std::min(bytes, kStagedBytes);
  current_.active = true;
  current_.header = header;
  current_.staged.resize(sizeof header + beside);
  std::memcpy(current_.staged.data(), &header, sizeof header);
  if (beside > 0) transfer->copy(current_.staged.data() + sizeof header, first, beside);
  current_.staged_written = 0;
  current_.rest_bytes = bytes - beside;
  current_.rest = current_.rest_bytes == 0 ? nullptr : run.data() + beside;
  current_.transfer = std::move(transfer);
}

size_t Outbox::write_current(Channel& channel) {
  size_t moved = 0;
  if (current_.staged_written < current_.staged.size()) {
    moved = channel.write_some(current_.staged.data() + current_.staged_written,
                               current_.staged.size() - current_.staged_written);
    current_.staged_written += moved;
    if (current_.staged_written < current_.staged.size()) return moved;
  }
  while (current_.rest_bytes > 0) {
    const size_t more = channel.write_some(current_.rest, current_.rest_bytes);
    if (more == 0) return moved;
    current_.rest += more;
    current_.rest_bytes -= more;
    moved += more;
  }
  finish_current();
  return moved;
}

void Outbox::finish_current() {
  current_.active = false;
  const std::shared_ptr<SendTransfer> transfer = std::move(current_.transfer);
  if (!transfer) return;
  if (current_.header.kind == FrameKind::kEager) transfer->finish();
  if (current_.header.kind != FrameKind::kData) return;
  const auto message = messages_.find(current_.header.number);
  message->second.sent += static_cast<size_t>(current_.header.bytes);
  if (message->second.sent < transfer->size) {
    streams_.push_back(current_.header.number);
    return;
  }
  messages_.erase(message);
  transfer->finish();
}

// A frame that was begun must be completed, or all later ones are lost. The sender's buffer may change from now on, so
// copy the rest of the frame.
void Outbox::abandon_current() {
  current_.staged.insert(current_.staged.end(), current_.rest, current_.rest + current_.rest_bytes);
  current_.rest_bytes = 0;
  current_.transfer = nullptr;
}

}  // namespace procgroup
