#include "messages/connection.hpp"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "runtime/failure_record.hpp"

namespace procgroup {
namespace {

constexpr size_t kReadBytes = 1024 * 1024;  // read in one turn, so that other connections get theirs
constexpr int kMostTurns = 64;              // for what a peer has sent before its end

std::string describe(const ChannelClosed& closed) {
  if (closed.error_number == 0) return "it closed its connection";
  return "its connection broke: " + std::generic_category().message(closed.error_number);
}

}  // namespace

void Connection::attach(std::unique_ptr<Channel> channel, const SingleCopy* single_copy) {
  channel_ = std::move(channel);
  if (single_copy == nullptr) return;
  single_copy_ = *single_copy;
  outbox_.expose_through(&*single_copy_);
}

bool Connection::write() {
  if (!channel_ || fault_) return false;
  try {
    return outbox_.write(*channel_);
  } catch (const ChannelClosed& closed) {
    // Frames that the peer had sent before may still be readable; they were published, so they are delivered.
    drain();
    if (!fault_) fault_ = loss(describe(closed));
    return true;
  }
}

bool Connection::read() {
  if (!channel_ || fault_) return false;
  try {
    return read_frames();
  } catch (const ChannelClosed& closed) {
    fault_ = loss(describe(closed));
  } catch (const MalformedFrame& malformed) {
    fault_ = Lost{.peer = peer_, .reason = malformed.reason};
  }
  return true;
}

// Read the frames that have arrived, more than a socket's buffer holds. The bound keeps a flooding peer from occupying
// this thread.
void Connection::drain() {
  draining_ = true;
  for (int turn = 0; turn < kMostTurns && read(); ++turn) {
  }
}

bool Connection::read_frames() {
  bool moved = false;
  drained_ = false;
  turn_bytes_ = 0;
  while (turn_bytes_ < kReadBytes && !fault_ && !paused()) {
    if (current_.active) {
      if (!read_payload()) break;
    } else if (staged_end_ - staged_begin_ >= sizeof(FrameHeader)) {
      begin_frame();
    } else if (!fill_staged()) {
      break;
    }
    moved = true;
  }
  return moved;
}

bool Connection::fill_staged() {
  if (drained_) return false;
  std::memmove(staged_.data(), staged_.data() + staged_begin_, staged_end_ - staged_begin_);
  staged_end_ -= staged_begin_;
  staged_begin_ = 0;
  const size_t room = staged_.size() - staged_end_;
  const size_t moved = channel_->read_some(staged_.data() + staged_end_, room);
  staged_end_ += moved;
  turn_bytes_ += moved;
  drained_ = moved < room;
  return moved > 0;
}

void Connection::begin_frame() {
  std::memcpy(&current_.header, staged_.data() + staged_begin_, sizeof(FrameHeader));
  staged_begin_ += sizeof(FrameHeader);
  const FrameHeader& header = current_.header;
  current_.payload_bytes = payload_bytes(header);
  current_.payload_read = 0;
  switch (header.kind) {
    case FrameKind::kEager:
      return begin_eager();
    case FrameKind::kData:
      return begin_data();
    case FrameKind::kAnnounce:
      return on_announce(header);
    case FrameKind::kGrant:
      return outbox_.granted(header.number);
    case FrameKind::kRefuse:
      return outbox_.refused(header.number, header.bytes);
    case FrameKind::kWithdraw:
      return on_withdraw(header);
    case FrameKind::kTaken:
      return outbox_.taken(header.number);
  }
}

void Connection::begin_eager() {
  current_.active = true;
  current_.offset = 0;
  current_.receive = matching_.take_posted(current_.header.key, peer_);
  current_.kept = current_.receive == nullptr;
  if (current_.kept) {
    current_.payload.resize(current_.payload_bytes);
    return;
  }
  current_.receive->source = peer_;
  if (current_.receive->fits(current_.payload_bytes, current_.header.type)) return;
  current_.receive->refuse(peer_, current_.payload_bytes, current_.header.type);
}

void Connection::begin_data() {
  const auto found = streams_.find(current_.header.number);
  if (found == streams_.end()) throw MalformedFrame{"it sent data of a message that was not granted"};
  const Stream& stream = found->second;
  if (current_.payload_bytes > stream.total - stream.received) {
    throw MalformedFrame{"it sent more data than it had announced"};
  }
  current_.active = true;
  current_.receive = stream.receive;
  current_.offset = static_cast<size_t>(stream.received);
  current_.kept = false;
}

// Where the next byte of the payload goes; null when it is discarded: the receive was cancelled or failed.
std::byte* Connection::destination() {
  if (current_.kept) return current_.payload.data() + current_.payload_read;
  if (current_.receive->is_completed()) return nullptr;
  return current_.receive->data + current_.offset + current_.payload_read;
}

bool Connection::read_payload() {
  const size_t left = current_.payload_bytes - current_.payload_read;
  std::byte* into = destination();
  const size_t staged = std::min(left, staged_end_ - staged_begin_);
  size_t moved = staged;
  if (staged > 0) {
    if (into != nullptr) std::memcpy(into, staged_.data() + staged_begin_, staged);
    staged_begin_ += staged;
  } else if (left > 0) {
    if (into == nullptr) return fill_staged();
    if (drained_) return false;
    const size_t there = channel_->read_both(into, left, staged_.data(), staged_.size());
    turn_bytes_ += there;
    // A channel that fills the first block only may have more behind it.
    drained_ = there != left && there < left + staged_.size();
    if (there == 0) return false;
    moved = std::min(left, there);
    staged_begin_ = 0;
    staged_end_ = there - moved;
  }
  current_.payload_read += moved;
  if (current_.receive) current_.receive->add_moved(moved);
  if (current_.payload_read == current_.payload_bytes) end_frame();
  return true;
}

void Connection::end_frame() {
  current_.active = false;
  if (current_.header.kind == FrameKind::kEager) {
    end_eager();
  } else {
    end_data();
  }
  current_.receive = nullptr;
}

void Connection::end_eager() {
  if (!current_.kept) {
    if (!current_.receive->is_completed()) current_.receive->complete(current_.payload_bytes);
    return;
  }
  UnexpectedMessage message{.source = peer_,
                            .key = current_.header.key,
                            .announced = false,
                            .number = 0,
                            .bytes = current_.payload_bytes,
                            .type = current_.header.type,
                            .payload = std::move(current_.payload)};
  current_.payload.clear();
  // A receive may have been started while the payload was on its way.
  if (const auto receive = matching_.take_posted(message.key, peer_)) return accept(std::move(message), receive);
  if (message.key == kExitKey) return take_exit(message.payload);
  if (message.key == kLeftKey) return static_cast<void>(has_left_ = true);
  matching_.keep(std::move(message));
}

void Connection::take_exit(const std::vector<std::byte>& record) {
  if (exit_) return;
  const std::optional<Failure> failure = decode(record, world_size_);
  const Failed* failed = failure ? failure->as<Failed>() : nullptr;
  if (failed == nullptr) return;
  exit_ = Failed{.peer = peer_, .reason = failed->reason, .sudden = failed->sudden};
  if (failed->sudden) fault_ = exit_;
}

Failure Connection::loss(std::string how) const {
  if (exit_) return *exit_;
  return Lost{.peer = peer_, .reason = has_left_ ? kEndedWithoutError : std::move(how)};
}

void Connection::end_data() {
  const auto stream = streams_.find(current_.header.number);
  stream->second.received += current_.payload_bytes;
  if (stream->second.received < stream->second.total) return;
  streams_.erase(stream);
  if (!current_.receive->is_completed()) current_.receive->complete(current_.offset + current_.payload_bytes);
}

void Connection::on_announce(const FrameHeader& header) {
  UnexpectedMessage message{.source = peer_,
                            .key = header.key,
                            .announced = true,
                            .number = header.number,
                            .bytes = header.bytes,
                            .type = header.type,
                            .payload = {}};
  if (const auto receive = matching_.take_posted(header.key, peer_)) return accept(std::move(message), receive);
  matching_.keep(std::move(message));
}

void Connection::on_withdraw(const FrameHeader& header) {
  const Failure withdrawn = Failed{.peer = peer_, .reason = "the sender cancelled the message before it was complete"};
  matching_.forget_announced(peer_, header.key, header.number);
  if (const auto receive = reads_.remove(header.number)) fail_unless_completed(*receive, withdrawn);
  const auto stream = streams_.find(header.number);
  if (stream == streams_.end()) return;
  fail_unless_completed(*stream->second.receive, withdrawn);
  streams_.erase(stream);
}

void Connection::accept(UnexpectedMessage message, const std::shared_ptr<ReceiveTransfer>& receive) {
  receive->source = peer_;
  if (!receive->fits(message.bytes, message.type)) {
    receive->refuse(peer_, message.bytes, message.type);
    if (message.announced) outbox_.refuse(message.number, receive->capacity);
    return;
  }
  if (message.announced) {
    if (streams_.contains(message.number) || reads_.contains(message.number)) {
      fail_unless_completed(*receive, Lost{.peer = peer_, .reason = "it announced two messages with one number"});
      fault_ = *receive->failure();
    } else if (!single_copy_ || !reads_.begin(*single_copy_, message.number, receive, message.bytes)) {
      stream(message.number, receive, message.bytes);
    }
    return;
  }
  if (!message.payload.empty()) std::memcpy(receive->data, message.payload.data(), message.payload.size());
  receive->complete(message.payload.size());
}

void Connection::stream(uint64_t number, std::shared_ptr<ReceiveTransfer> receive, uint64_t total) {
  streams_.emplace(number, Stream{std::move(receive), total});
  outbox_.grant(number);
}

bool Connection::read_exposed() {
  if (!channel_ || fault_ || reads_.empty()) return false;
  SingleCopyReads::Read ended;
  try {
    switch (reads_.advance(*single_copy_, ended)) {
      case SingleCopyReads::Outcome::kBlock:
        break;
      case SingleCopyReads::Outcome::kCompleted:
        outbox_.take(ended.number);
        ended.receive->complete(ended.done);
        break;
      case SingleCopyReads::Outcome::kUnreadable:
        stream(ended.number, std::move(ended.receive), ended.total);
    }
  } catch (const std::out_of_range&) {
    fault_ = Lost{.peer = peer_, .reason = "it exposed memory outside of its arena"};
  }
  return true;
}

bool Connection::send_at_once(const FrameHeader& header, const void* data) {
  if (!channel_ || fault_ || !outbox_.idle()) return false;
  try {
    return channel_->write_whole(&header, sizeof header, data, static_cast<size_t>(header.bytes));
  } catch (const ChannelClosed&) {
    return false;  // the ordinary path meets it again, and records the fault
  }
}

AtOnce Connection::receive_at_once(const FrameHeader& expected, void* data) {
  const bool between_frames = !current_.active && staged_begin_ == staged_end_;
  if (!channel_ || channel_->descriptor() >= 0 || fault_ || !between_frames) return AtOnce::kNot;
  const size_t bytes = static_cast<size_t>(expected.bytes);
  try {
    FrameHeader header;
    const size_t there = channel_->peek(&header, sizeof header);
    if (there == 0) return AtOnce::kNotYet;
    if (there < sizeof header + bytes || std::memcmp(&header, &expected, sizeof header) != 0) return AtOnce::kNot;
    channel_->take(sizeof header, data, bytes);
    return AtOnce::kDone;
  } catch (const ChannelClosed&) {
    return AtOnce::kNot;
  }
}

void Connection::stop(const ReceiveTransfer& receive) {
  if (const uint64_t number = reads_.remove(receive)) outbox_.refuse(number, receive.capacity);
  for (const auto& [number, stream] : streams_) {
    if (stream.receive.get() == &receive) outbox_.refuse(number, receive.capacity);
  }
}

void Connection::fail(const Failure& failure) {
  if (failure_) return;
  drain();  // frames that the peer had published before are delivered
  failure_ = failure;
  outbox_.fail_all(failure);
  reads_.fail_all(failure);
  for (const auto& [number, stream] : streams_) fail_unless_completed(*stream.receive, failure);
  if (current_.receive) fail_unless_completed(*current_.receive, failure);
  streams_.clear();
  current_ = {};
  channel_ = nullptr;
  matching_.forget_all_announced(peer_);
}

short Connection::events() const {
  if (!channel_) return 0;
  const int reading = paused() ? 0 : POLLIN;
  const int writing = outbox_.has_something_to_write() ? POLLOUT : 0;
  return static_cast<short>(reading | writing);
}

}  // namespace procgroup
