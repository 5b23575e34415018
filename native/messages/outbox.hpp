// The send queue of one connection: it schedules frames and writes them.
//
// Small frames wait in one queue, in order. Large messages that were granted take turns, one data frame
// each, and small frames go in between: at most kSmallInARow of them while a large message waits, so
// that neither kind can starve the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "messages/frame.hpp"
#include "messages/single_copy.hpp"
#include "messages/transfer.hpp"
#include "transport/channel.hpp"

namespace procgroup {

class Outbox {
 public:
  // From now on, expose large messages to the peer. `single_copy` outlives this outbox.
  void expose_through(const SingleCopy* single_copy) { single_copy_ = single_copy; }

  void send(std::shared_ptr<SendTransfer> transfer);
  void grant(uint64_t number);
  void refuse(uint64_t number, uint64_t capacity);
  void take(uint64_t number);

  // The receiver's answers to an announced message.
  void granted(uint64_t number);
  void refused(uint64_t number, uint64_t capacity);
  void taken(uint64_t number);

  // Fail the send and remove its frames from the queues.
  void cancel(SendTransfer& transfer, const Failure& failure);
  void fail_all(const Failure& failure);

  // Write as much as the channel takes now, within one turn's bound; return whether anything moved.
  bool write(Channel& channel);

  bool has_something_to_write() const { return current_.active || !small_.empty() || !streams_.empty(); }
  // Whether a large message waits for its receiver's answer.
  bool awaits_answer() const { return !messages_.empty(); }
  bool idle() const { return !has_something_to_write(); }
  bool flushed() const { return !has_something_to_write() && messages_.empty(); }

 private:
  struct SmallFrame {
    FrameHeader header;
    std::shared_ptr<SendTransfer> transfer;  // eager: what it carries; announce: what it announces
  };
  struct LargeMessage {
    std::shared_ptr<SendTransfer> transfer;
    Exposure exposure;  // until it is granted
    size_t sent = 0;
  };
  // The frame that is being written: first `staged` (frames without a payload that go before it, its header, and a
  // payload that is scattered), then `rest`.
  struct CurrentFrame {
    bool active = false;
    FrameHeader header;
    std::shared_ptr<SendTransfer> transfer;  // null when no transfer waits for this frame
    std::vector<std::byte> staged;
    size_t staged_written = 0;
    const std::byte* rest = nullptr;
    size_t rest_bytes = 0;
  };

  bool start_next();
  bool may_start_small() const;
  void stage(const FrameHeader& header);
  // Begin a frame, whose payload is the transfer's data from `first` on.
  void start(const FrameHeader& header, std::shared_ptr<SendTransfer> transfer, size_t first);
  size_t write_current(Channel& channel);
  void finish_current();
  void abandon_current();

  const SingleCopy* single_copy_ = nullptr;
  std::deque<SmallFrame> small_;
  std::unordered_map<uint64_t, LargeMessage> messages_;  // announced, neither streamed nor taken
  std::deque<uint64_t> streams_;                         // numbers of those that were granted
  uint64_t last_number_ = 0;
  int small_in_a_row_ = 0;
  CurrentFrame current_;
};

}  // namespace procgroup
