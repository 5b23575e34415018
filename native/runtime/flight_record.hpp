// The flight record of one rank: what it did lately and what it is doing, in a file that outlives its process.
//
//     +--------+----------------+------------------+----------------------+
//     | header | groups         | source lines     | calls: see Recorder  |
//     +--------+----------------+------------------+----------------------+
//
// The file is mapped: by its rank, which writes it, by the other ranks of the host, which describe this rank in their
// errors, and by `procgroup explain`. So a rank that is stuck, stopped or killed is described, too. The rank holds a
// shared lock (flock) on its file while it lives. Where no file can be made, the record is in memory of the same
// form, which only the ranks of this host reach. What makes no sense in a record is left out: others wrote it.
//
// Vocabulary. A *source line* is the line of the program that issued a call, as in "train.py:12". A *beat* is one
// moment on the processor's clock and on the monotonic one, by which a reader turns the former's times into the
// latter's; the last one also says until when the rank lived.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.hpp"
#include "runtime/recorder.hpp"
#include "runtime/shared_text.hpp"

namespace procgroup {

enum class RankState : uint32_t { kRunning, kLeft, kFailed };

const char* rank_state_name(RankState state);  // "running"

// Why a rank failed: by an error of its own, in a call that its ranks do not complete together (as their records of the
// call tell), or because another rank has ended.
enum class FailureOrigin : uint32_t { kOwn, kCall, kPeer };

const char* failure_origin_name(FailureOrigin origin);  // "own"
FailureOrigin failure_origin(std::string_view name);    // throws std::invalid_argument for another name

struct RecordedFailure {
  std::string reason{};
  FailureOrigin origin = FailureOrigin::kOwn;
  int peer = -1;  // kPeer: the global rank that has ended, or -1 where it is not known
};

// What a record says of its rank and of the process.
struct RecordedRank {
  int rank = 0;  // global
  int world_size = 1;
  std::string job;      // of the process group, the same on all its ranks
  std::string program;  // how the process was started
};

struct RecordedGroup {
  uint64_t identity;
  int rank;  // of this rank in the group
  int size;
  std::string name;
  std::vector<int> members;  // global ranks, in group order; empty where the record had no room for them
};

// The global ranks for which a collective waits; of more than kMostAwaited only their number.
struct AwaitedRanks {
  static constexpr size_t kMostAwaited = 4;
  std::vector<int> ranks{};
  size_t count = 0;
};

// The calls in CUDA graphs of one group of which a GPU has run a replay for long.
struct RunningReplays {
  static constexpr size_t kMost = 8;
  std::vector<uint64_t> calls{};  // their numbers
  bool are_all = false;           // whether no other call's replay has run for long

  bool operator==(const RunningReplays&) const = default;
};

struct FlightRecordLayout;

// What a reader can tell from the memory of a record, which its writer may be changing.
class FlightRecordView {
 public:
  // Throws std::runtime_error when that memory is no record of this version.
  FlightRecordView(const std::byte* memory, size_t bytes);

  RecordedRank rank() const;
  int64_t pid() const;
  // In which namespace that pid has a meaning: the inode of /proc/self/ns/pid.
  uint64_t pid_namespace() const;
  std::string host() const;
  std::string boot() const;  // of the host: monotonic clocks of one boot are the same
  int64_t created_wall_ns() const;
  int64_t created_ns() const;
  // The last beat, on the monotonic clock.
  int64_t beat_ns() const;
  RankState state() const;
  RecordedFailure failure() const;  // of a failed rank
  // The calls that are in the ring, oldest first, with times on the rank's monotonic clock.
  std::vector<Record> calls() const;
  // How many calls were recorded, also those that are in the ring no more.
  uint64_t recorded() const;
  // "train.py:12"; empty when it is not known.
  std::string source_line(uint32_t number) const;
  // The function of procgroup that is called there, where its name is not that of the operation: "all_gather_object",
  // which makes calls of other names. Otherwise empty.
  std::string function(uint32_t number) const;
  // Both: "train.py:12 (all_gather_object)".
  std::string call_site(uint32_t number) const;
  std::vector<RecordedGroup> groups() const;
  // How often the rank has noted that elements move in calls of this group.
  uint64_t moves(uint64_t group) const;
  // For whom this collective waited when the rank last looked; empty where that is not known.
  AwaitedRanks awaited(const Descriptor& call) const;
  // Without calls, and not all, where nothing is known.
  RunningReplays replays(uint64_t group) const;
  // The Python stack of the thread that makes calls, innermost frame first, when it was last asked for, with its moment
  // on the monotonic clock.
  std::optional<SharedText<8192>::Value> stack() const;
  // What the program reported last: see procgroup.report.
  std::optional<SharedText<256>::Value> report() const;

 private:
  bool has_source_line(uint32_t number) const;

  const FlightRecordLayout& layout_;
};

// How a rank's process is stopped, as in "stopped (SIGSTOP)": empty when it is not, or runs where that cannot be seen.
std::string describe_stopped(const FlightRecordView& record);

class FlightRecord {
 public:
  static constexpr size_t kSourceLines = 512;

  // Make a record in a new file at this path, or, where that is empty or refused, in memory that has no name.
  static std::unique_ptr<FlightRecord> create(const std::string& path, const RecordedRank& rank);
  // Map another rank's, to read it, and to request its stack if the descriptor can be written. Throws
  // std::system_error, or std::runtime_error when it is no record.
  static std::unique_ptr<FlightRecord> attach(FileDescriptor descriptor);
  FlightRecord(const FlightRecord&) = delete;
  ~FlightRecord();

  int descriptor() const { return descriptor_.get(); }
  FlightRecordView view() const { return {memory_, bytes_}; }
  // Ask the rank for its stack: see Observer. Without effect on a record that cannot be written.
  void request_stack();

  // For the owner alone. Any thread may call any of them.
  Recorder& recorder() { return *recorder_; }
  void add_group(const RecordedGroup& group);
  // The number of a line, for Recorder; 0 when there is no room for it. See FlightRecordView::function.
  uint32_t add_source_line(std::string_view line, std::string_view function = {});
  // For whom a collective waits, of which each group has one at a time.
  void set_awaited(const Descriptor& call, const std::vector<int>& global_ranks);
  void set_replays(uint64_t group, const RunningReplays& replays);
  // Elements move in a call of this group: ranks that wait for this one are to know.
  void note_move(uint64_t group);
  void beat();
  void set_stack(std::string_view text);
  // Counts the requests for the stack; a futex.
  std::atomic<uint32_t>& stack_requests();
  void set_report(std::string_view text);
  // The first end counts.
  void end(RankState state, const RecordedFailure& failure = {});

 private:
  explicit FlightRecord(FileDescriptor descriptor);  // without a descriptor, in memory of this process alone
  FlightRecordLayout& layout() { return *reinterpret_cast<FlightRecordLayout*>(memory_); }

  FileDescriptor descriptor_;
  bool is_writable_ = true;
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  std::unique_ptr<Recorder> recorder_;
  SpinLock writing_;  // guards the tables and the texts; not in the shared memory, where a death would keep it
};

}  // namespace procgroup
