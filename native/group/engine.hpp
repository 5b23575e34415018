// One rank's engine: its arena, its peers and whether they live, its messages and its groups.
//
//     Engine ── Arena            memory that this rank shares, and the one doorbell of its waiters
//       │  ├── Peer per rank     the peer's arena (same host), its Unix socket, whether it lives
//       │  ├── LifeLock/Watcher  notifies peers when this process ends, and watches for the end of theirs
//       │  ├── Messages          point-to-point, and collectives where there is no shared memory
//       │  └── ProgressThread    advances asynchronous operations
//       └── Group ...            numbering, agreement, collectives
//
// Threads. Any thread may issue calls. `messages_mutex` guards Messages, GroupHandshakes and WaitEdgeExchange; `peers_`
// is complete before the first group is made and constant from then on, except for the atomic status of each peer. Lock
// order: the mutexes of a group (group.hpp), then messages_mutex, then the progress thread's mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "group/group_handshakes.hpp"
#include "group/group_heap.hpp"
#include "group/member_end.hpp"
#include "liveness/deadlock.hpp"
#include "liveness/life.hpp"
#include "messages/messages.hpp"
#include "messages/wait_edge_exchange.hpp"
#include "runtime/call_report.hpp"
#include "runtime/flight_record.hpp"
#include "runtime/observer.hpp"
#include "runtime/progress_thread.hpp"
#include "runtime/wait_report.hpp"
#include "runtime/waiting.hpp"
#include "transport/arena.hpp"
#include "transport/peer_memory.hpp"

namespace procgroup {

struct EngineOptions {
  int rank = 0;
  int world_size = 1;
  bool ranks_are_threads = false;
  // Of the flight record: the file, or none, and what the record says of this rank.
  std::string record_path{};
  RecordedRank recorded{};
};

enum class PeerStatus : uint32_t { kPresent, kLeft, kLost };

class Engine final : public Waiter, public WaitForGraph {
 public:
  // The number of missing ranks whose calls an error describes.
  static constexpr size_t kExplainedRanks = 8;

  // `shared` asks for an arena that others can map; without one (or when the system refuses it) only sockets can be
  // attached.
  Engine(const EngineOptions& options, bool shared);
  ~Engine() override;
  Engine(const Engine&) = delete;

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  bool shares_memory() const { return !arena_->is_private(); }
  // Why there is no arena that others can map; empty when there is one, or when none was asked for.
  const std::string& arena_problem() const { return arena_problem_; }
  int arena_descriptor() const { return arena_->descriptor(); }
  int arena_bell() const { return arena_->bell(); }
  int record_descriptor() const { return record_->descriptor(); }
  // How many ranks share how many usable cores: decides whether waiting spins or yields.
  void set_cores(int usable_cores, int local_ranks) {
    policy_.oversubscribed = local_ranks > usable_cores;
    policy_.core_to_spare = 2 * local_ranks <= usable_cores;
    policy_.spin_ns = policy_.oversubscribed ? WaitPolicy::kYieldNs : WaitPolicy::kSpinNs;
  }

  // Set-up, before the first group, from one thread. The engine then owns the descriptors.
  void attach_shared(int peer, FileDescriptor arena, FileDescriptor bell, FileDescriptor record, FileDescriptor socket);
  void attach_socket(int peer, FileDescriptor socket, int64_t pid);
  // A rank that is a thread of this process: one mapping serves both.
  void attach_thread(int peer, const Engine& engine);

  Arena& arena() { return *arena_; }
  // Null when others cannot map it.
  std::shared_ptr<Arena> shared_arena() const { return shares_memory() ? arena_ : nullptr; }
  GroupHeap& heap() { return *heap_; }
  const Arena* peer_arena(int peer) const { return peer == rank() ? arena_.get() : peers_[index(peer)]->arena.get(); }
  // How to read a peer's arrays; null for this rank, and where there is no shared memory.
  const PeerMemory* peer_memory(int peer) const { return peers_[index(peer)]->memory.get(); }
  PeerStatus peer_status(int peer) const;
  // How a peer has ended, or ends, with a world rank. Under the mutex of Messages only for a peer that shares memory.
  std::optional<MemberEnd> end_of(int peer) const;
  // Set-up: the host on which a peer runs, where that is another one.
  void set_host(int peer, std::string host) { peers_[index(peer)]->host = std::move(host); }
  // Add the process and the host of the lost peer, a world rank, where they are not named yet.
  void identify(Lost& lost, int peer) const;

  Messages& messages() { return messages_; }
  std::mutex& messages_mutex() { return messages_mutex_; }
  GroupHandshakes& handshakes() { return handshakes_; }  // under that mutex
  // Advance every channel, and answer the requests of other ranks. Under that mutex.
  bool pump();
  // Describe what each of these world ranks is doing, in words that follow "rank 1 is", for a reader who waits in this
  // group: read in shared memory, else requested by messages, within about 0.2 s. Not under that mutex.
  std::vector<std::string> calls_of(const std::vector<int>& peers, uint64_t group);
  // The same without waiting for answers: what is known now.
  std::vector<std::string> known_calls(const std::vector<int>& peers, uint64_t group);
  // Whether the GPU of each of these world ranks runs a replay of this call in a CUDA graph, as calls_of() finds out.
  // Nothing where that is not known. A replay that runs for less than 0.1 s may not count yet.
  std::vector<std::optional<bool>> replays_of(const std::vector<int>& peers, const Descriptor& call);
  // Whether a rank of this host is in a call now.
  bool is_in_call(int peer) const;
  // Whether it is a rank of this host whose process is stopped.
  bool is_stopped(int peer) const;
  // Request the state of those of these world ranks whose memory this rank cannot read. Not under that mutex.
  // `captured`: see WaitEdgeExchange.
  void query_calls(const std::vector<int>& peers, uint64_t group, uint64_t captured = 0);
  // The line and the function of a rank's collective, as in FlightRecordView::call_site: read in shared memory, else as
  // that rank has posted it. Empty when it is not known.
  std::string source_line(int peer, const Descriptor& call) const;
  // Where the program made this rank's call: the line, and the function as FlightRecordView has them.
  struct CallPlace {
    std::string line;
    std::string function;
  };
  CallPlace place_of(const Descriptor& call) const;
  // Post this rank's to a rank of another host.
  void post_source_line(int peer, const Descriptor& call);
  // Wait, for at most 0.3 s, until `is_known`, while messages are received.
  void await_answers(const std::function<bool()>& is_known);
  // The groups of this rank, by which calls_of names what a rank is in.
  void add_name(uint64_t group, NamedGroup named);
  void remove_name(uint64_t group);
  // Set-up: after how long a call that waits is reported for the first time; 0: never.
  void set_wait_report(int64_t nanoseconds) { wait_report_ns_ = nanoseconds; }
  int64_t wait_report_ns() const { return wait_report_ns_; }
  // Run the periodic work of a waiting call in this group. Not under that mutex, and never for long.
  void report_wait(WaitReport::Due due, const WaitingCall& call, uint64_t group);
  // Elements move in a call of this group, as those of these world ranks whose records this rank reads have noted, or
  // this one has: a number that changes then.
  void note_move(uint64_t group) { record_->note_move(group); }
  uint64_t moves_of(const std::vector<int>& peers, uint64_t group) const;
  // Record the peers for which a collective waits; ranks that wait for this one read it.
  void record_awaited(const Descriptor& call, std::vector<int> peers);
  bool uses_sockets() const { return uses_sockets_; }
  ProgressThread& progress() { return *progress_; }
  Recorder& recorder() { return record_->recorder(); }
  FlightRecord& record() { return *record_; }
  // The calling thread makes calls: see Observer.
  void note_caller() { observer_->note_caller(); }
  const WaitPolicy& policy() const { return policy_; }
  // How long a wait lasts before it is examined for deadlocks.
  int64_t suspicious_ns() const {
    return options_.ranks_are_threads ? DeadlockDetector::kSuspiciousOfThreadsNs : DeadlockDetector::kSuspiciousNs;
  }

  WaitEdgeBoard* own_board() override { return board_; }
  const WaitEdgeBoard* board(int peer) const override { return peer == rank() ? board_ : peers_[index(peer)]->board; }
  bool is_quiet() override;
  void subscribe(int peer) override;
  void publish() override;
  void announce(const std::vector<WaitEdge>& cycle) override;
  std::string line_of_wait(OpKind op) override;

  // Wake this process's own waiters.
  void kick();
  // The progress thread has finished an asynchronous operation.
  void completed();
  // Wait until more than `seen` asynchronous operations have completed or `seconds` have passed; return their number.
  uint64_t await_completions(uint64_t seen, double seconds);
  void sleep(int64_t nanoseconds, const std::function<bool()>& ready) override;
  const std::atomic<uint32_t>& news() const override { return news_; }

  // Flush sent data for at most so many seconds; return whether all of it has left this process.
  bool flush(double seconds);
  // The ranks that have not taken all that was sent to them.
  std::vector<int> unsent_to();
  // Leave in order: notify the peers and free everything. Idempotent.
  void shutdown();
  // Record that this rank ends early, and why; ranks that wait for it report the reason. With `at_once`, every call in
  // progress fails now, here and on the other ranks. The first reason counts.
  void fail(const RecordedFailure& failure, bool at_once);
  // Wake all waiters, so that they examine a change now.
  void announce_news() {
    news_.fetch_add(1, std::memory_order_release);
    kick();
  }
  // The ranks' numbers in texts and errors, if they differ from the world ranks. In flight records they keep the
  // first.
  void set_global_ranks(std::vector<int> ranks);
  int global_rank(int world_rank) const;
  int recorded_rank(int world_rank) const;
  // The ranks, by their numbers in the world, that have left, were lost, or end before their time.
  std::vector<int> gone_ranks() const;
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Also from the moment on at which the other ranks can learn that this one aborts.
  bool aborting() const { return aborting_.load(std::memory_order_acquire); }

  // True in a child that was forked from the process that made this engine: nothing may be used there.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }
  // Called in the forked child, by the fork handler: forgets what is shared, and touches none of it.
  void abandon();

 private:
  struct Peer {
    std::shared_ptr<Arena> arena;
    const WaitEdgeBoard* board = nullptr;  // or the copy of it
    FileDescriptor socket;
    std::unique_ptr<PeerMemory> memory;
    std::shared_ptr<FlightRecord> record;  // where it shares memory
    int64_t pid = 0;
    std::string host{};
    std::string how;                                       // written before status
    std::atomic<PeerStatus> status{PeerStatus::kPresent};  // release by the watcher, acquire by readers
  };

  static size_t index(int rank) { return static_cast<size_t>(rank); }
  void make_arena(Arena arena);
  void make_life();
  void attach_arena(int peer, std::shared_ptr<Arena> arena, std::shared_ptr<FlightRecord> record,
                    FileDescriptor socket);
  void post_exit(const std::string& reason, bool at_once);
  void post_left();
  std::optional<Failure> exit_in_memory(int peer) const;
  void set_status(int peer, PeerStatus status, std::string how);
  NamedGroup group_of(uint64_t identity) const;
  // The record of this rank, or of another one of this host; null for those of other hosts.
  const FlightRecord* record_of(int peer) const;
  // What a rank of this host is doing, by its record; follows "rank 1 is".
  std::string activity(const FlightRecordView& record, uint64_t group) const;
  void await_calls(const std::vector<int>& peers, uint64_t group, uint64_t captured = 0);
  static std::optional<bool> runs_replay(const FlightRecordView& record, uint64_t group, uint64_t captured);
  bool has_answered(int peer, int64_t asked_ns) const;
  bool has_gone(int peer) const;
  bool can_answer();
  bool is_unreachable(int peer) const;
  void answer_while_idle();
  void sleep_on_sockets(int64_t nanoseconds, const std::function<bool()>& ready);

  EngineOptions options_;
  std::vector<int> global_ranks_;    // guarded by names_mutex_, as the next
  std::vector<int> recorded_ranks_;  // as global_ranks_ was first
  std::atomic<bool> failed_{false};
  WaitPolicy policy_;
  int64_t wait_report_ns_ = WaitReport::kFirstNs;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<GroupHeap> heap_;
  std::unique_ptr<const uint64_t> nonce_;  // by which peers know this process's memory, see PeerMemory
  std::string arena_problem_;
  uint64_t exit_record_ = 0;        // offset in the arena
  WaitEdgeBoard* board_ = nullptr;  // in the arena
  std::vector<std::unique_ptr<Peer>> peers_;
  mutable std::mutex names_mutex_;  // taken last
  std::map<uint64_t, NamedGroup> names_;
  mutable std::mutex messages_mutex_;
  Messages messages_;
  GroupHandshakes handshakes_;
  WaitEdgeExchange waits_;
  std::atomic<bool> uses_sockets_{false};
  std::shared_ptr<FlightRecord> record_;
  int64_t stack_requested_ns_ = 0;  // by this rank of itself, for ranks of other hosts; guarded by messages_mutex_
  std::atomic<bool> aborting_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<uint32_t> news_{0};  // see Waiter; released after what it announces
  std::atomic<bool> forked_{false};
  bool shut_down_ = false;
  std::mutex completions_mutex_;
  std::condition_variable completions_changed_;
  uint64_t completions_ = 0;
  std::unique_ptr<ProgressThread> progress_;
  std::unique_ptr<LifeLock> life_lock_;
  std::unique_ptr<LifeWatcher> watcher_;
  std::unique_ptr<Observer> observer_;
};

}  // namespace procgroup
