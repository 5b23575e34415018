// Point-to-point messages over channels: framing, matching by (group, tag), eager and rendezvous.
//
// Vocabulary. A *message* goes from one rank to another under a *key* (group, tag); messages with one
// key between two ranks arrive in the order in which they were sent. A message of at most kEagerBytes
// is *eager*: it is written at once and, when no receive is posted for it yet, kept by the receiver as
// *unexpected*. A larger one takes the *rendezvous* path: it is announced, waits until a receive matches (*granted*),
// and then streams into the receiver's own buffer; or the receiver copies it from the sender's (single_copy.hpp).
// The same frames run over sockets and shared memory.
//
// The ranks in the failures and in missing() of a transfer are world ranks; groups translate them.
//
// Messages is not thread-safe: the engine holds one mutex around every call.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/iovec.hpp"
#include "dtype/dtype.hpp"
#include "runtime/operation.hpp"
#include "transport/channel.hpp"

namespace procgroup {

inline constexpr size_t kEagerBytes = 16 * 1024;
inline constexpr int kAnySource = -1;

struct MessageKey {
  uint64_t group;
  uint64_t tag;  // users' tags are below 2^63; the engine's own have the highest bit set
  bool operator==(const MessageKey&) const = default;
};

// The key of a rank's exit record. No group has the identity 0.
inline constexpr MessageKey kExitKey{0, uint64_t{1} << 63 | 2};
// The key of the message that a rank leaves in order.
inline constexpr MessageKey kLeftKey{0, uint64_t{1} << 63 | 3};

// The element type of a message: a Dtype's number plus one, or untyped bytes. Both sides must agree.
using ElementType = uint16_t;
inline constexpr ElementType kUntyped = 0;
inline ElementType element_type(Dtype dtype) { return static_cast<ElementType>(static_cast<int>(dtype) + 1); }

// The result of an immediate send or receive: kNot means that the ordinary path has to be taken.
enum class AtOnce { kDone, kNotYet, kNot };

// Receives small messages as they arrive, from a world rank; it may not use Messages.
using Listener = std::function<void(int source, const std::vector<std::byte>& message)>;

// One send or receive. Its buffer must live until is_completed().
class Transfer : public Operation {
 public:
  int source = -1;   // of a completed receive: the world rank of the sender
  size_t bytes = 0;  // of a completed receive: the size of the message
  // So many bytes of a large message have been written or read here. Under the lock of Messages, but for a look.
  std::atomic<uint64_t> moved_bytes{0};
  void add_moved(size_t more) { moved_bytes.store(moved() + more, std::memory_order_relaxed); }
  uint64_t moved() const override { return moved_bytes.load(std::memory_order_relaxed); }
};

struct SingleCopy;

class Messages {
 public:
  explicit Messages(int rank, int world_size);
  ~Messages();

  // Large messages to and from this peer are read from the sender's buffer, when there is `single_copy`.
  void attach(int peer, std::unique_ptr<Channel> channel, const SingleCopy* single_copy = nullptr);
  bool attached(int peer) const;

  // Start a transfer; `peer` is a world rank. A message whose size or type differs from the receive's
  // fails that receive (Failure kMismatch; `reason` describes the message); the channel stays usable.
  std::shared_ptr<Transfer> send(int peer, MessageKey key, const void* data, size_t bytes, ElementType type = kUntyped);
  // The `bytes` bytes from `offset` on of a scatter-gather list.
  std::shared_ptr<Transfer> send(int peer, MessageKey key, std::span<const Iovec> iovecs, size_t offset, size_t bytes);
  // `sources` restricts kAnySource to these world ranks (the group's members).
  std::shared_ptr<Transfer> receive(int peer, MessageKey key, void* data, size_t capacity,
                                    const std::vector<int>* sources = nullptr, ElementType type = kUntyped);
  // As receive(), but a smaller message is accepted too; the transfer's `bytes` is its size.
  std::shared_ptr<Transfer> receive_up_to(int peer, MessageKey key, void* data, size_t capacity,
                                          const std::vector<int>* sources = nullptr);
  // The fast path of blocking calls, which makes no transfer. Sending writes a small message whole when nothing is
  // being written to that peer, and returns false otherwise. Receiving takes a small message whole when it is the next
  // one of the peer and no other receive could match it.
  bool send_at_once(int peer, MessageKey key, const void* data, size_t bytes, ElementType type);
  AtOnce receive_at_once(int peer, MessageKey key, void* data, size_t bytes, ElementType type);
  // Send a message that Messages keeps itself, without a transfer to wait for.
  void post(int peer, MessageKey key, std::vector<std::byte> message);
  // Send a peer the record of why this process ends, after all that was sent before. When it is sudden, every transfer
  // with this rank fails there now; else those for which the end of the connection comes too early.
  void post_exit(int peer, const Failure& failure);
  // The exit record that a peer has sent, a Failed; null when none.
  const Failure* exit_failure(int peer) const;
  // Whether a peer has sent, under kLeftKey, that it leaves in order: the end of its channel is no loss.
  bool has_left(int peer) const;
  // Begin or end to expect a message of no group from a peer: then its channel is read, however much of it is kept.
  void expect(int peer, bool begins);
  // Set-up: a function that returns why a peer has ended, or nothing, where the peer publishes that by other means than
  // post_exit. It is called when the peer's channel has ended, which may be seen first.
  void read_ends_with(std::function<std::optional<Failure>(int peer)> stated_end);
  // Pass every small message under this key to the listener, also those that have arrived already, and keep none: a
  // peer may send them at any time, and they take no memory here. A null listener ends that.
  void listen(MessageKey key, Listener listener);
  // The tags of a group's messages from this world rank that have come, or have been announced, and that nobody has
  // received.
  std::vector<uint64_t> unread_tags(int peer, uint64_t group) const;
  // Cancel a transfer that has not completed; it fails with `failure` and its buffer is not touched again.
  void cancel(Transfer& transfer, Failure failure);

  // Advance every channel as far as possible now; return whether anything moved.
  bool pump();

  // Every transfer with that peer fails with this failure, now and later; but small messages that had
  // arrived before are still received. A receive from any source fails when all its sources have failed.
  // A channel that breaks, or a frame that no correct peer sends, does the same with Failure kLost.
  void fail_peer(int peer, Failure failure);

  // Why every transfer with that peer fails; null while its channel is whole.
  const Failure* peer_failure(int peer) const;

  // What to poll while waiting for sockets (events already set).
  void descriptors(std::vector<pollfd>& into) const;
  // Whether no frame is half read or waits to be written; after pump() has moved nothing, nothing is unread either.
  bool is_quiet() const;
  // Whether everything that was sent has left this process.
  bool flushed() const;
  // The peers to which something has not been sent yet.
  std::vector<int> unsent_to() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace procgroup
