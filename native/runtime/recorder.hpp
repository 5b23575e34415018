// The recorder: the last calls of one rank, in memory that its peers can read, also when the rank is
// stuck or dead. It is part of that rank's flight record.
//
// Vocabulary. The *ring* holds kEntries *entries* of one cache line each; call number `index` (counted
// from 0 per recorder) is in entry index % kEntries until a later one takes its place.
//
//     +--------+---------+---------+-- - - --+-----------+
//     | header | entry 0 | entry 1 |         | entry N-1 |
//     +--------+---------+---------+-- - - --+-----------+
//     entry: version | group | sequence | count | started | ended | op, dtype, ... | source line, wait for its turn
//
// An asynchronous collective is *issued* when the program calls it, and *started* when it has its turn and its number.
// An entry is a seqlock. Its version is odd while it is written, and otherwise tells which call it is of;
// a reader that finds the same even version before and after has not read a mixture. Times are processor
// ticks; who reads turns them into nanoseconds with two moments on both clocks: one in the header, from
// when the library was loaded, and a later one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/spin_lock.hpp"
#include "base/ticks.hpp"
#include "ops/descriptor.hpp"

namespace procgroup {

// A queued call has ended on the host: its work on a GPU has not.
enum class CallState : uint8_t { kStarted, kCompleted, kFailed, kIssued, kQueued };

const char* call_state_name(CallState state);  // "started"

// One call, as it was read. Times are on the monotonic clock; those of the start and the end are 0 before.
struct Record {
  uint64_t index;
  Descriptor call;
  CallState state;
  uint32_t source;  // number of the source line; 0: not known
  int64_t issued_ns;
  int64_t started_ns;
  int64_t ended_ns;
};

// Writes the ring. Any thread of the owner may call any function.
class Recorder {
 public:
  static constexpr size_t kEntries = 1024;
  static_assert((kEntries & (kEntries - 1)) == 0, "an entry is found by masking");

  // How much memory a recorder needs, aligned to 8 bytes at least (to 64 for speed).
  static size_t bytes();

  // Begin an empty ring in this memory, which outlives the recorder.
  explicit Recorder(void* memory);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // A call starts now; returns its index.
  uint64_t begin(const Descriptor& call, uint32_t source = 0);
  // A call is issued, and has to wait for its turn; returns its index.
  uint64_t issue(const Descriptor& call, uint32_t source = 0);
  // Its turn has come. Its index may be a new one: so many calls may have come since that the entry is another's.
  uint64_t start(uint64_t index, const Descriptor& call, uint32_t source);
  // A call that has completed already, and started at that many ticks.
  void record(const Descriptor& call, uint64_t started, uint32_t source = 0);
  // Ends on the host, while its work on a GPU goes on; without effect, as the next two, when so many calls came after
  // that the entry is another's by now.
  void queue(uint64_t index);
  void complete(uint64_t index);
  void fail(uint64_t index);

  // The calls that are in the ring, oldest first.
  std::vector<Record> read() const { return read(memory_, ClockPair::now()); }
  // The same of any recorder's memory; `later` is a moment on its host's clocks. What makes no sense in it is left out:
  // a peer wrote it.
  static std::vector<Record> read(const void* memory, const ClockPair& later);
  // How many calls were added to it.
  static uint64_t recorded(const void* memory);

 private:
  uint64_t add(const Descriptor& call, CallState state, uint32_t source, uint64_t started, uint64_t ended);
  void end(uint64_t index, CallState state);

  void* const memory_;
  uint64_t next_ = 0;  // guarded by writing_
  SpinLock writing_;   // excludes the other writers; not in the shared memory, where a death would keep it
};

}  // namespace procgroup
