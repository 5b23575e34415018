// Match messages with receives.
//
// Vocabulary. A receive that found no message is *posted*; a message that found no receive is *unexpected*
// and is kept. For each key there is one queue of posted receives, in the order in which they were started,
// and one of unexpected messages, in the order in which they arrived; both are searched from the front, so
// messages of one key from one rank are received in the order in which they were sent, also by receives
// from any source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "messages/transfer.hpp"

namespace procgroup {

struct UnexpectedMessage {
  int source;
  MessageKey key;
  bool announced;  // a large message, of which only the announcement has arrived
  uint64_t number;
  uint64_t bytes;
  ElementType type;
  std::vector<std::byte> payload;
};

class Matching {
 public:
  explicit Matching(int world_size)
      : kept_bytes_(static_cast<size_t>(world_size), 0), expected_(static_cast<size_t>(world_size), 0) {}

  void post(std::shared_ptr<ReceiveTransfer> receive);
  // The posted receive that matches this message, removed from its queue; null when there is none.
  std::shared_ptr<ReceiveTransfer> take_posted(MessageKey key, int source);
  // Whether a receive is posted, or an unexpected message is kept, under this key.
  bool holds(MessageKey key) const {
    return (!posted_.empty() && posted_.contains(key)) || (!unexpected_.empty() && unexpected_.contains(key));
  }
  // Whether a receive of some group is posted that a message from this rank could match, or one is expected.
  bool awaits(int source) const;
  // Begin or end to expect a message of this rank that is of no group.
  void expect(int source, bool begins) { expected_[static_cast<size_t>(source)] += begins ? 1 : -1; }
  void remove_posted(const ReceiveTransfer& receive);
  // Remove and return the posted receives for which this holds.
  std::vector<std::shared_ptr<ReceiveTransfer>> take_posted_if(
      const std::function<bool(const ReceiveTransfer&)>& holds);

  void keep(UnexpectedMessage message);
  // Pass the messages of this key, kept ones and later ones, to the listener instead of keeping them; null ends that.
  void listen(MessageKey key, Listener listener);
  // The unexpected message that matches this receive, removed from its queue.
  std::optional<UnexpectedMessage> take_unexpected(const ReceiveTransfer& receive);
  // The tags of a group's unexpected messages from this rank.
  std::vector<uint64_t> unread_tags(int source, uint64_t group) const;
  void forget_announced(int source, MessageKey key, uint64_t number);
  void forget_all_announced(int source);

  // Memory of the unexpected messages from this rank, their records included.
  size_t kept_bytes(int source) const { return kept_bytes_[static_cast<size_t>(source)]; }

 private:
  struct KeyHash {
    size_t operator()(const MessageKey& key) const noexcept {
      return static_cast<size_t>((key.group ^ (key.tag * 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu >> 7);
    }
  };
  void forget_if(std::deque<UnexpectedMessage>& queue, const std::function<bool(const UnexpectedMessage&)>& holds);

  std::unordered_map<MessageKey, std::deque<std::shared_ptr<ReceiveTransfer>>, KeyHash> posted_;
  std::unordered_map<MessageKey, std::deque<UnexpectedMessage>, KeyHash> unexpected_;
  std::vector<size_t> kept_bytes_;
  std::vector<int> expected_;  // how often
  std::unordered_map<MessageKey, Listener, KeyHash> listeners_;
};

}  // namespace procgroup
