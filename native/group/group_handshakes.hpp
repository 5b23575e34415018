// How the members of a new group find each other, and what they hear of its end: small messages, one to each member.
//
//     makes   I make this group; my group memory lies there        lets every member go on that has received all others
//     ended   I left it, or gave it up, and why                    ends those who wait for me
//
// No store is asked and nobody but the members takes part. Since each rank sees what the others make with it, lists of
// ranks that differ are noticed: somebody waits for me in a group that I do not make, while I wait for it in another.
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

// What one rank has said about one group.
struct GroupHandshake {
  uint64_t identity = 0;
  uint64_t memory = 0;           // offset of its group memory in its arena
  std::string call;              // in words: "new_group([0, 1])"
  bool left = false;             // in order
  std::optional<Failure> ended;  // why it gave the group up
  int64_t ended_ns = 0;          // when this rank received that
};

class GroupHandshakes {
 public:
  // Groups of one rank that are kept, beside those that this rank makes too. Who makes a group waits for its members,
  // so no rank comes so far ahead; where one does, what it says stays unread, and so it is held back.
  static constexpr size_t kMostAhead = 16 * 1024;

  GroupHandshakes(Messages& messages, int rank, int world_size);
  GroupHandshakes(const GroupHandshakes&) = delete;
  ~GroupHandshakes();

  // This rank makes the group, from now until close().
  void open(uint64_t identity, std::vector<int> members, uint64_t memory, const std::string& call);
  // The group ends on this rank. The other members are told why when there is a failure, and that it left when `tell`.
  void close(uint64_t identity, const Failure* failure, bool tell);
  // Take in what has arrived; follows a pump().
  void collect();

  // What a peer has said about a group; null when nothing yet.
  const GroupHandshake* received(int peer, uint64_t identity) const;
  // Why nothing more will come from a peer; null while something may.
  const Failure* silenced(int peer) const;
  // A group that `peer` makes with this rank and this rank does not make: one that it still waits for, or one that it
  // gave up after `since_ns` because the ranks disagreed. Null when there is none.
  const GroupHandshake* conflicting(int peer, int64_t since_ns) const;
  // That has been reported: it is no conflict of later groups, and its end is no news.
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
