// How the members of a new group find each other, and what they hear of its end: small messages, one to each member.
//
//     makes   I make this group; my group memory lies there        lets every member go on that has heard all others
//     ended   I left it, or gave it up, and why                    ends those who wait for me
//
// No store is asked and nobody but the members takes part. Since each rank sees what the others make with it, lists of
// ranks that differ are noticed: somebody waits for me in a group that I do not make, while I wait for it in another.
//
// Everything here happens under the mutex that guards Messages. Ranks are world ranks.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/failure.hpp"
#include "engine/messages.hpp"

namespace procgroup {

// What one rank has said about one group.
struct Introduction {
  uint64_t identity = 0;
  uint64_t memory = 0;           // offset of its group memory in its arena
  std::string call;              // in words: "new_group([0, 1])"
  bool left = false;             // in order
  std::optional<Failure> ended;  // why it gave the group up
  int64_t ended_ns = 0;          // when this rank heard that
};

class Introductions {
 public:
  // Groups of one rank that are kept, beside those that this rank makes too. Who makes a group waits for its members,
  // so no rank comes so far ahead; where one does, what it says stays unread, and so it is held back.
  static constexpr size_t kMostAhead = 16 * 1024;

  Introductions(Messages& messages, int rank) : messages_(messages), rank_(rank) {}
  Introductions(const Introductions&) = delete;
  ~Introductions();

  // This rank makes the group, from now until close().
  void open(uint64_t identity, std::vector<int> members, uint64_t memory, const std::string& call);
  // The group ends on this rank. The other members are told why when there is a failure, and that it left when `tell`.
  void close(uint64_t identity, const Failure* failure, bool tell);
  // Take in what has arrived; follows a pump().
  void collect();

  // What a peer has said about a group; null when nothing yet.
  const Introduction* heard(int peer, uint64_t identity) const;
  // Why nothing more will come from a peer; null while something may.
  const Failure* silenced(int peer) const;
  // A group that `peer` makes with this rank and this rank does not make: one that it still waits for, or one that it
  // gave up after `since_ns` because the ranks disagreed. Null when there is none.
  const Introduction* conflicting(int peer, int64_t since_ns) const;
  // That has been reported: it is no conflict of later groups, and its end is no news.
  void forget(int peer, uint64_t identity);

 private:
  struct Notice;
  // What is being received from one peer: from the first group that it is a member of.
  struct Ear {
    std::array<std::byte, 2048> buffer;
    std::shared_ptr<Transfer> receive;
    size_t groups = 0;  // of that peer, in heard_
  };
  void listen(int peer, Ear& ear);
  void post(const std::vector<int>& members, const Notice& notice, const std::string& text,
            const std::vector<int>& missing);
  void take(int peer, const std::byte* message, size_t bytes);

  Messages& messages_;
  const int rank_;
  std::map<uint64_t, std::vector<int>> open_;  // members
  std::map<std::pair<int, uint64_t>, Introduction> heard_;
  std::map<int, Ear> ears_;
};

}  // namespace procgroup
