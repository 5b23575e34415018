// What a large collective through shared memory does on one rank, as data: a list of steps.
//
// Vocabulary. An array is handled in *chunks*. A rank *copies in* a chunk in one of its own *slots* and *publishes*:
// its progress counter rises to a value. Others *await* that value, then reduce or collect (copy out) what lies in
// the slot. Values count from the start of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace procgroup {

inline constexpr int kEveryone = -1;

// A range of bytes that a step reads or writes.
struct Place {
  // kPeerInput and kPeerOutput are another rank's array where it lies: of blocks, the one that is for this rank.
  enum class Kind : uint8_t { kInput, kOutput, kSlot, kPeerInput, kPeerOutput };
  Kind kind;
  int8_t slot = 0;    // kSlot
  int32_t rank = 0;   // kInput, kOutput: which block, where the call has one per rank; else: whose
  size_t offset = 0;  // in bytes
};

struct Step {
  enum class Kind : uint8_t {
    kCopy,        // from -> to
    kReduce,      // in rank order: `own` of this rank, `from` of every other -> to
    kRead,        // from a peer's array -> to
    kReadReduce,  // as kReduce, but `from` is the peers' arrays
    kPublish,     // my progress := value
    kAwait,       // until progress of `rank` (or of kEveryone) >= value
  };
  Kind kind;
  int32_t rank = 0;
  uint64_t value = 0;
  size_t bytes = 0;
  Place to{};
  Place from{};
  Place own{};   // kReduce
  Place also{};  // kReduce: where the result goes too, when has_also
  bool has_also = false;
};

struct Schedule {
  std::vector<Step> steps;
  uint64_t published = 0;  // the last value that every rank publishes in this call
  uint64_t chunks = 0;     // slots that this call uses, in turn

  void clear() {
    steps.clear();
    published = 0;
    chunks = 0;
  }
};

// How much each rank has for each other, in bytes.
class BlockTable {
 public:
  void reset(int size, size_t bytes) {
    size_ = static_cast<size_t>(size);
    bytes_.assign(size_ * size_, bytes);
  }
  size_t& between(int from, int to) { return bytes_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)]; }
  size_t between(int from, int to) const { return bytes_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)]; }
  size_t largest() const;
  // Without what ranks keep themselves: of all blocks, and of those that `rank` gives or gets.
  size_t largest_moved() const;
  size_t largest_moved(int rank) const;

 private:
  size_t size_ = 0;
  std::vector<size_t> bytes_;
};

// Appends steps to an empty schedule. Steps that would move nothing are left out.
class ScheduleWriter {
 public:
  explicit ScheduleWriter(Schedule& schedule) : schedule_(schedule) { schedule.clear(); }

  void copy(Place to, Place from, size_t bytes) {
    if (bytes != 0) schedule_.steps.push_back({.kind = Step::Kind::kCopy, .bytes = bytes, .to = to, .from = from});
  }
  // Own elements are read where the caller has them: they need not be in a slot, and their cache lines are
  // the ones that an in-place result is written to.
  void reduce(Place to, Place from, Place own, size_t bytes) {
    if (bytes == 0) return;
    schedule_.steps.push_back({.kind = Step::Kind::kReduce, .bytes = bytes, .to = to, .from = from, .own = own});
  }
  // What was just reduced goes there too.
  void share_result(Place also, size_t bytes) {
    if (bytes == 0) return;
    schedule_.steps.back().also = also;
    schedule_.steps.back().has_also = true;
  }
  void read(Place to, Place from, size_t bytes) {
    if (bytes != 0) schedule_.steps.push_back({.kind = Step::Kind::kRead, .bytes = bytes, .to = to, .from = from});
  }
  void read_reduce(Place to, Place from, Place own, size_t bytes) {
    if (bytes == 0) return;
    schedule_.steps.push_back({.kind = Step::Kind::kReadReduce, .bytes = bytes, .to = to, .from = from, .own = own});
  }
  void publish(uint64_t value) {
    schedule_.steps.push_back({.kind = Step::Kind::kPublish, .value = value});
    schedule_.published = value;
  }
  void await(int rank, uint64_t value) {
    schedule_.steps.push_back({.kind = Step::Kind::kAwait, .rank = rank, .value = value});
  }

 protected:
  Schedule& schedule_;
};

}  // namespace procgroup
