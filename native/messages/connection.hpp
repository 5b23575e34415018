// The connection to one peer: its channel, its queues of outgoing frames, and the frame that is being read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "messages/frame.hpp"
#include "messages/matching.hpp"
#include "messages/outbox.hpp"
#include "messages/single_copy.hpp"
#include "messages/transfer.hpp"
#include "transport/channel.hpp"

namespace procgroup {

// Bytes of unexpected messages that are kept for one peer before its channel is left unread. The peer's writes then
// fill the channel and stop: nothing is lost and memory stays bounded. While this process itself waits for a message
// from that peer, or for the answer to one, it reads on: the awaited frame may be queued behind.
inline constexpr size_t kKeptBytesLimit = 64 * 1024 * 1024;

class Connection {
 public:
  Connection(int peer, int world_size, Matching& matching)
      : peer_(peer), world_size_(world_size), matching_(matching) {}

  void attach(std::unique_ptr<Channel> channel, const SingleCopy* single_copy);
  int peer() const { return peer_; }
  bool attached() const { return channel_ != nullptr; }
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }
  bool flushed() const { return outbox_.flushed() && (!channel_ || channel_->delivered()); }
  bool is_quiet() const {
    return !current_.active && staged_begin_ == staged_end_ && outbox_.idle() && reads_.empty() && !paused();
  }

  // Read or write as much as possible now, within one turn's bound; return whether anything moved.
  // Both record a broken channel or a malformed frame as fault() and do not throw.
  bool read();
  bool write();
  // Read a block of a message that the peer exposes; return whether there was one.
  bool read_exposed();
  const Failure* fault() const { return fault_ ? &*fault_ : nullptr; }
  // The exit record that the peer has sent, see Messages::post_exit; null when none.
  const Failure* exit_failure() const { return exit_ ? &*exit_ : nullptr; }
  bool has_left() const { return has_left_; }

  // Messages::send_at_once and Messages::receive_at_once, for this peer.
  bool send_at_once(const FrameHeader& header, const void* data);
  AtOnce receive_at_once(const FrameHeader& expected, void* data);

  void send(std::shared_ptr<SendTransfer> transfer) { outbox_.send(std::move(transfer)); }
  void cancel(SendTransfer& transfer, const Failure& failure) { outbox_.cancel(transfer, failure); }
  // Stop the transfer into this receive, if one is in progress.
  void stop(const ReceiveTransfer& receive);
  // Deliver a message from this peer to the receive that matched it.
  void accept(UnexpectedMessage message, const std::shared_ptr<ReceiveTransfer>& receive);

  // Fail all transfers with this peer, now and later, and close the channel.
  void fail(const Failure& failure);

  // Events to poll for; 0 when this connection waits for no event of a socket.
  short events() const;
  int descriptor() const { return channel_ ? channel_->descriptor() : -1; }

 private:
  // A large message that was granted and streams in.
  struct Stream {
    std::shared_ptr<ReceiveTransfer> receive;
    uint64_t total;
    uint64_t received = 0;
  };
  // The frame whose payload is being read. Its bytes go to `receive`, else are kept, else are discarded.
  struct CurrentFrame {
    bool active = false;
    FrameHeader header;
    size_t payload_bytes = 0;
    size_t payload_read = 0;
    std::shared_ptr<ReceiveTransfer> receive;
    size_t offset = 0;  // in the receive's buffer
    bool kept = false;
    std::vector<std::byte> payload;
  };

  bool paused() const {
    return !draining_ && !current_.active && matching_.kept_bytes(peer_) > kKeptBytesLimit &&
           !matching_.awaits(peer_) && !outbox_.awaits_answer();
  }
  void drain();
  bool read_frames();
  bool fill_staged();
  void begin_frame();
  void begin_eager();
  void begin_data();
  bool read_payload();
  std::byte* destination();
  void end_frame();
  void end_eager();
  void take_exit(const std::vector<std::byte>& record);
  Failure loss(std::string how) const;
  void end_data();
  void on_announce(const FrameHeader& header);
  void on_withdraw(const FrameHeader& header);
  void stream(uint64_t number, std::shared_ptr<ReceiveTransfer> receive, uint64_t total);

  const int peer_;
  const int world_size_;
  Matching& matching_;
  std::unique_ptr<Channel> channel_;
  Outbox outbox_;
  std::unordered_map<uint64_t, Stream> streams_;
  std::optional<SingleCopy> single_copy_;  // with a peer of this host
  SingleCopyReads reads_;
  CurrentFrame current_;
  // Bytes that were read ahead, so that a small frame costs one system call.
  std::array<std::byte, 8 * 1024> staged_;
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  bool draining_ = false;  // the peer sends no more: what is there is read, however much of it is kept
  bool drained_ = false;   // the last read of this turn got less than it asked for
  size_t turn_bytes_ = 0;  // read in this turn
  bool has_left_ = false;  // in order, as the peer has sent
  std::optional<Failure> exit_;
  std::optional<Failure> fault_;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
