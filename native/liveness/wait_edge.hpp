// The wait edge that a rank publishes while it is stuck in a call, by which ranks detect a cycle of waits.
//
// Vocabulary. A rank *shows* a wait when it can do nothing before one other rank, `next`, acts: its only thread waits,
// no call is pending, no message is unread or unwritten. `epoch` is a new number for every wait that is shown. A rank
// *confirms* its next one's epoch when it has seen that wait shown and has then still received nothing from it. A
// *verdict* announces to the members of a cycle, with their epochs, that one of them has found it.
//
// Memory order. `epoch` and `version` are odd while the fields that they guard change. Every field is stored with
// release and loaded with acquire: a reader that finds the same even number before and after has not read a mixture.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/descriptor.hpp"

namespace procgroup {

// One rank's place in a cycle. Ranks are world ranks.
struct WaitEdge {
  int rank = -1;
  int next = -1;  // the awaited rank
  OpKind op = OpKind::kBarrier;
  uint64_t number = 0;  // of a message its tag, of a collective its sequence number, of a new group nothing
  uint64_t epoch = 0;
  std::string line{};  // of the program in which that rank waits, as in "train.py:12"; empty when it is not known

  bool is_message() const { return procgroup::is_message(op); }
  // A text for error messages: "recv from 1 at train.py:12", "all_reduce #3, waiting for rank 1",
  // "new_group, waiting for rank 1". The tag 0 of a message is named only `with_tag`.
  std::string describe(bool with_tag = false) const;
};

class WaitEdgeBoard {
 public:
  static constexpr size_t kMembers = 64;    // in the longest cycle that is found
  static constexpr size_t kLineBytes = 96;  // of a line; what is longer is cut off

  // For the owner of the board; one thread at a time.
  void show(const WaitEdge& wait);
  void hide();
  void confirm(uint64_t epoch) { confirmed_.store(epoch, std::memory_order_release); }
  void announce(const std::vector<WaitEdge>& cycle);
  // For a copy of another rank's board, by hide() and announce() too: that rank shows this wait, and has confirmed
  // that.
  void copy(const WaitEdge& wait, uint64_t confirmed);

  // For every rank. Nothing while no wait is shown.
  std::optional<WaitEdge> wait(int rank) const;
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  uint64_t confirmed() const { return confirmed_.load(std::memory_order_acquire); }
  // The cycle that was announced last; empty when there is none.
  std::vector<WaitEdge> verdict() const;

 private:
  using Field = std::atomic<uint64_t>;
  static constexpr size_t kLineWords = kLineBytes / sizeof(uint64_t);
  struct Entry {
    Field ranks;  // rank, next: 32 bits each
    Field op;
    Field number;
    Field epoch;
    Field line[kLineWords];  // zeros after its last character
  };
  void write(const WaitEdge& wait, uint64_t confirmed, uint64_t meanwhile, uint64_t epoch);
  static void write(Entry& entry, const WaitEdge& wait);
  static WaitEdge read(const Entry& entry);

  alignas(64) Field epoch_;
  Field confirmed_;
  Field shown_;
  Entry wait_;
  alignas(64) Field version_;
  Field members_;
  Entry cycle_[kMembers];
};

}  // namespace procgroup
