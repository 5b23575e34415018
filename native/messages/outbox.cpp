#include "messages/outbox.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace procgroup {
namespace {

constexpr int kSmallInARow = 16;
constexpr size_t kWrittenBytes = 1024 * 1024;  // written in one turn, so that other connections get theirs

}  // namespace

void Outbox::send(std::shared_ptr<SendTransfer> transfer) {
  FrameHeader header = eager_header(transfer->key, transfer->size, transfer->type);
  if (transfer->size > kEagerBytes) {
    header.kind = FrameKind::kAnnounce;
    header.number = ++last_number_;
    const bool exposes = single_copy_ != nullptr && !transfer->is_scattered();
    Exposure exposure =
        exposes ? single_copy_->expose(header.number, transfer->data, transfer->size, !messages_.empty()) : Exposure();
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
  cancel(*transfer, Failed{.peer = transfer->peer,
                           .reason = "the receiver refused the message of " + std::to_string(transfer->size) +
                                     " bytes: its receive is for other elements or another size (" +
                                     std::to_string(capacity) + " bytes), or was cancelled"});
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
  while (moved < kWrittenBytes && (current_.active || start_next())) {
    moved += write_current(channel);
    if (current_.active) break;  // the channel is full
  }
  return moved > 0;
}

bool Outbox::may_start_small() const { return !small_.empty() && (streams_.empty() || small_in_a_row_ < kSmallInARow); }

// Frames without a payload go together with the next one that has one: each system call on a socket costs some
// microseconds, and so does each packet.
bool Outbox::start_next() {
  current_.staged.clear();
  current_.staged_written = 0;
  for (; may_start_small() && small_.front().header.kind != FrameKind::kEager; ++small_in_a_row_) {
    stage(small_.front().header);
    small_.pop_front();
  }
  if (may_start_small()) {
    SmallFrame frame = std::move(small_.front());
    small_.pop_front();
    ++small_in_a_row_;
    start(frame.header, std::move(frame.transfer), 0);
  } else if (small_in_a_row_ = 0; !streams_.empty()) {
    const uint64_t number = streams_.front();
    streams_.pop_front();
    const LargeMessage& message = messages_.at(number);
    const size_t bytes = std::min(kBulkBytes, message.transfer->size - message.sent);
    start({.kind = FrameKind::kData, .number = number, .bytes = bytes}, message.transfer, message.sent);
  }
  current_.active = !current_.staged.empty();
  return current_.active;
}

void Outbox::stage(const FrameHeader& header) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  current_.staged.insert(current_.staged.end(), bytes, bytes + sizeof header);
}

// A scattered payload is copied into one block here, a frame at a time, which stays in cache until it is written.
void Outbox::start(const FrameHeader& header, std::shared_ptr<SendTransfer> transfer, size_t first) {
  const size_t bytes = static_cast<size_t>(header.bytes);
  const std::span<const std::byte> run = transfer->run(first);
  const bool is_scattered = run.size() < bytes;
  stage(header);
  if (is_scattered) {
    const size_t before = current_.staged.size();
    current_.staged.resize(before + bytes);
    transfer->copy(current_.staged.data() + before, first, bytes);
  }
  current_.header = header;
  current_.rest_bytes = is_scattered ? 0 : bytes;
  current_.rest = is_scattered ? nullptr : run.data();
  current_.transfer = std::move(transfer);
}

size_t Outbox::write_current(Channel& channel) {
  size_t moved = 0;
  while (current_.staged_written < current_.staged.size() || current_.rest_bytes > 0) {
    const size_t staged = current_.staged.size() - current_.staged_written;
    const size_t written = channel.write_both(current_.staged.data() + current_.staged_written, staged, current_.rest,
                                              current_.rest_bytes);
    if (written == 0) return moved;
    const size_t of_staged = std::min(staged, written);
    current_.staged_written += of_staged;
    current_.rest += written - of_staged;
    current_.rest_bytes -= written - of_staged;
    if (current_.transfer) current_.transfer->add_moved(written);
    moved += written;
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
