// Point-to-point messages over channels: framing, matching by (group, tag), eager and rendezvous.
//
// Vocabulary. A *message* goes from one rank to another under a *key* (group, tag); messages with one
// key between two ranks arrive in the order in which they were sent. A message of at most kEagerBytes
// is *eager*: it is written at once and, when nobody has asked for it yet, kept by the receiver as
// *unexpected*. A larger one announces itself, waits until the receiver has matched it (*granted*),
// and then streams into the receiver's own buffer; or the receiver copies it from where it lies (exposure.hpp).
// The same frames run over sockets and shared memory.
//
// The ranks in the failures and in missing() of a transfer are world ranks; groups translate them.
//
// Messages is not thread-safe: the engine holds one mutex around every call.
#pragma once

#include <poll.h>

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

// Of the message in which a rank says why it ends. No group has the identity 0.
inline constexpr MessageKey kExitKey{0, uint64_t{1} << 63 | 2};

// What the elements of a message are: a Dtype's number plus one, or nothing but bytes. Both sides must agree.
using ElementType = uint16_t;
inline constexpr ElementType kUntyped = 0;
inline ElementType element_type(Dtype dtype) { return static_cast<ElementType>(static_cast<int>(dtype) + 1); }

// What became of a message that was to go or come at once: kNot means that the ordinary way has to be taken.
enum class AtOnce { kDone, kNotYet, kNot };

// Hears small messages as they arrive, from a world rank; it may not use Messages.
using Listener = std::function<void(int source, const std::vector<std::byte>& message)>;

// One send or receive. Its buffer must live until is_completed().
class Transfer : public Operation {
 public:
  int source = -1;   // receives, when over: the world rank that it came from
  size_t bytes = 0;  // receives, when over: how many bytes came
};

struct SingleCopy;

class Messages {
 public:
  explicit Messages(int rank, int world_size);
  ~Messages();

  // Large messages to and from this peer are read where they lie, when there is `single_copy`.
  void attach(int peer, std::unique_ptr<Channel> channel, const SingleCopy* single_copy = nullptr);
  bool attached(int peer) const;

  // Start a transfer; `peer` is a world rank. A message whose size or type differs from the receive's
  // fails that receive (Failure kMismatch; `reason` says what was sent); the channel stays usable.
  std::shared_ptr<Transfer> send(int peer, MessageKey key, const void* data, size_t bytes, ElementType type = kUntyped);
  // The `bytes` bytes from `offset` on of an array that lies in several places.
  std::shared_ptr<Transfer> send(int peer, MessageKey key, std::span<const Iovec> iovecs, size_t offset, size_t bytes);
  // `sources` restricts kAnySource to these world ranks (the group's members).
  std::shared_ptr<Transfer> receive(int peer, MessageKey key, void* data, size_t capacity,
                                    const std::vector<int>* sources = nullptr, ElementType type = kUntyped);
  // As receive(), but a smaller message is taken too; the transfer's `bytes` tells its size.
  std::shared_ptr<Transfer> receive_up_to(int peer, MessageKey key, void* data, size_t capacity,
                                          const std::vector<int>* sources = nullptr);
  // The shortcuts of blocking calls, which make no transfer. A small message is written whole, when nothing is being
  // written to that peer; false when it was not. A small message is taken whole, when it is the next that the peer
  // sent, and nobody else could be meant.
  bool send_at_once(int peer, MessageKey key, const void* data, size_t bytes, ElementType type);
  AtOnce receive_at_once(int peer, MessageKey key, void* data, size_t bytes, ElementType type);
  // Send a message of which Messages keeps the bytes itself, and for which nobody waits.
  void post(int peer, MessageKey key, std::vector<std::byte> message);
  // Send a peer the record of why this process ends, after all that was sent before. When it is sudden, every transfer
  // with this rank fails there now; else those for which the end of the connection comes too early.
  void post_exit(int peer, const Failure& failure);
  // What a peer has sent so; null when nothing. With `sudden`, only a sudden one.
  const Failure* exit_failure(int peer, bool sudden) const;
  // Set-up: what tells why a peer ends, or nothing, where it says so by other means than post_exit. It is asked when
  // the peer's channel has ended, which may be seen first.
  void read_ends_with(std::function<std::optional<Failure>(int peer)> stated_end);
  // Hand every small message under this key to the listener, also those that have arrived already, and keep none: a
  // peer may send them at any time, and they need no room here. Until the listener is null.
  void listen(MessageKey key, Listener listener);
  // Give up a transfer that is not over; it fails with `failure` and its buffer is not touched again.
  void cancel(Transfer& transfer, Failure failure);

  // Advance every channel as far as it goes now; tell whether anything moved.
  bool pump();

  // Every transfer with that peer fails with this failure, now and later; but small messages that had
  // arrived before are still received. A receive from any source fails when all its sources have failed.
  // A channel that breaks, or a frame that no correct peer sends, does the same with Failure kLost.
  void fail_peer(int peer, Failure failure);

  // What to poll while waiting for sockets (events already set).
  void descriptors(std::vector<pollfd>& into) const;
  // Whether no frame is half read or waits to be written; after pump() has moved nothing, nothing lies unread either.
  bool is_quiet() const;
  // Whether everything that was sent has left this process.
  bool flushed() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace procgroup
