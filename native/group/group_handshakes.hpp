// The handshake of a new group and the notification of its end: small messages, one to each member.
//
//     makes   the sender makes this group; its memory's offset      a member goes on when it has received all others'
//     ended   the sender left it, or gave it up, and why            ends the waits for the sender
//
// No store and no other rank takes part. Since each rank receives the groups that the others make with it, lists of
// ranks that differ are detected: a rank waits for this one in a group that this one does not make, while this one
// waits for that rank in another group.
//
// Everything here happens under the mutex that guards Messages. Ranks are world ranks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "messages/messages.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

// The state of one group as one rank has sent it.
struct GroupHandshake {
  uint64_t identity = 0;
  uint64_t memory = 0;           // offset of its group memory in its arena
  std::string call;              // in words: "new_group([0, 1])"
  bool left = false;             // in order
  uint64_t last = 0;             // then: the number of the last collective that the sender has completed
  std::optional<Failure> ended;  // why it gave the group up
  int64_t ended_ns = 0;          // when this rank received that
};

class GroupHandshakes {
 public:
  // The number of groups of one peer that are kept, beside those that this rank makes, too. A rank that makes a group
  // waits for its members, so no rank gets so far ahead; if one does, its messages stay unread, which holds it back.
  static constexpr size_t kMostAhead = 16 * 1024;

  GroupHandshakes(Messages& messages, int rank, int world_size);
  GroupHandshakes(const GroupHandshakes&) = delete;
  ~GroupHandshakes();

  // This rank makes the group, from now until close().
  void open(uint64_t identity, std::vector<int> members, uint64_t memory, const std::string& call);
  // The group ends on this rank. Send the failure, if any, to the other members; else, with `notify`, that it left
  // after it completed collective number `last`.
  void close(uint64_t identity, const Failure* failure, bool notify, uint64_t last = 0);
  // Process the messages that have arrived; follows a pump().
  void receive_arrived();

  // The state of a group as a peer has sent it; null before its first message.
  const GroupHandshake* received(int peer, uint64_t identity) const;
  // Why a peer sends no more messages; null while it may.
  const Failure* silenced(int peer) const;
  // A group that `peer` makes with this rank and this rank does not make: one that it still waits for, or one that it
  // gave up after `since_ns` because the ranks disagreed. Null when there is none.
  const GroupHandshake* conflicting(int peer, int64_t since_ns) const;
  // Forget a conflict that was reported: it does not count for later groups, nor does its end.
  void forget(int peer, uint64_t identity);

 private:
  struct Message;
  // What is being received from one peer: from the first group that it is a member of.
  struct Inbox {
    explicit Inbox(size_t bytes) : buffer(bytes) {}
    std::vector<std::byte> buffer;
    std::shared_ptr<Transfer> receive;
    size_t groups = 0;  // of that peer, in received_
  };
  void listen(int peer, Inbox& inbox);
  void post(const std::vector<int>& members, Message header, std::span<const std::byte> rest);
  void take(int peer, std::span<const std::byte> message);

  Messages& messages_;
  const int rank_;
  const int world_size_;
  const size_t largest_;                       // message, in bytes
  std::map<uint64_t, std::vector<int>> open_;  // members
  std::map<std::pair<int, uint64_t>, GroupHandshake> received_;
  std::map<int, Inbox> inboxes_;
};

}  // namespace procgroup
