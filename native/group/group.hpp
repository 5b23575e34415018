// One process group on this rank: numbers its calls, runs them in order, and detects its end.
//
// Collectives are first in, first out. A blocking call on an idle group runs in the caller's thread; when
// anything is pending it queues behind that, and the progress thread runs it. Messages have an order of
// their own per peer and tag, and never wait for collectives.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collective_call.hpp"
#include "collectives/relay.hpp"
#include "group/engine.hpp"
#include "group/failure_board.hpp"
#include "ops/request.hpp"
#include "runtime/recording.hpp"

namespace procgroup {

// Two ranks: arrays far larger than the caches are better exchanged by halves, which reads and writes less
// (64 MiB: 9.8 ms against 10.3 ms; 24 MiB: 2.9 against 2.8).
inline constexpr size_t kExchangedBytes = size_t{48} << 20;

struct GroupOptions {
  uint64_t id = 0;
  std::string name;
  std::vector<int> members;  // world ranks, in group order
  int rank = 0;              // this process's group rank
  // By group rank, the host of each member, as any number: equal for members that share memory. Empty: all share it,
  // or attach() sets them.
  std::vector<int> hosts{};
  GroupLayout layout{};
  MessageLimits limits{};
  size_t exchanged_bytes = kExchangedBytes;  // see CollectiveState
  ReadingRanges reading = ReadingRanges::for_this_processor();
};

// Whether a failure in the call `failed` is one of the running call, too: it ends the group, and with it all later
// calls. An earlier call was made well by the member that posted the failure, and may still complete.
bool concerns_call(const Descriptor& failed, const Descriptor& running);

// A failed call: thrown by the blocking forms, and made from a completed Operation.
struct OperationFailed {
  Failure failure;
  Descriptor call;
};

struct MessageRequest {
  OpKind op;     // kSend or kRecv
  void* data;    // not written by kSend
  size_t count;  // elements
  Dtype dtype;
  int peer;  // group rank, or kAnySource
  uint64_t tag;
  uint32_t source = 0;               // as in Request
  std::function<void()> after = {};  // as in Request: run when a receive has succeeded, before it completes
  std::shared_ptr<Task> task = {};   // as in Request; its `ready` is not asked
  bool external = false;             // the task moves the elements, and the engine a header in their place
  bool is_unawaited = false;         // as in Request
  // The array is on a device, whose queues run one transfer after the other: messages from one rank to another move in
  // the order in which the receiver has matched them.
  bool on_device = false;
};

class DeviceOperation;
class GroupOperation;
class MessageOperation;

class Group final : public Source {
 public:
  Group(Engine& engine, GroupOptions options);
  ~Group() override;

  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.members.size()); }
  // By group rank; empty where they are the group ranks.
  const std::vector<int>& global_ranks() const { return global_ranks_; }

  // The offset of this rank's group memory in its arena.
  uint64_t offset() const { return offset_; }
  // `offsets`: those of the members on this host, by group rank. `hosts`: the host of each member.
  void attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts);

  // Instead of attach(), for a group of ranks that have a common group already: notify the other members, and wait
  // until each has sent that it makes the group, too. `call` describes the call. Throws OperationFailed, with world
  // ranks.
  void handshake(const std::string& call, double seconds, LanguageRuntime& language, uint32_t source = 0);
  // After handshake() failed by a mismatch: see GroupCreation.
  const std::vector<uint64_t>& refused() const { return refused_; }

  // Blocking, for at most that many seconds. Throws OperationFailed.
  void run(Request& request, double seconds, LanguageRuntime& language);
  int run_message(const MessageRequest& request, double seconds, LanguageRuntime& language);  // the sender's group rank

  // Whether the input of a call may be given as iovecs: a broadcast on its root, or an all_gather, if it is not small.
  bool takes_iovecs(const Descriptor& call) const;

  // Asynchronous. With a host, whose lock is held, the caller's thread runs the call itself as long as that moves,
  // where there is no core to spare for the progress thread: to wake it would take the caller's core away. Without one,
  // or with a core to spare, it only announces a call whose bytes a device moves.
  std::shared_ptr<GroupOperation> start(Request request, double seconds);
  std::shared_ptr<GroupOperation> start(Request request, double seconds, LanguageRuntime& language);
  std::shared_ptr<GroupOperation> start_message(const MessageRequest& request, double seconds);
  // Wait in this thread for an operation of this group, at most until `deadline`; whether it has completed. Return what
  // has made it fail, which is a deadlock where this wait was part of one.
  struct Outcome {
    bool has_completed = false;
    std::optional<Failure> failure{};
  };
  Outcome await(GroupOperation& operation, Deadline deadline, LanguageRuntime& language, bool& interrupted);
  // A signal's handler has ended the wait of a blocking call: end the group, and wait for the end of the call.
  void end_interrupted(GroupOperation& operation, LanguageRuntime& language);
  // What a call raises that ends with `failure`. Where that is the loss or the end of what earlier calls need, too, and
  // nobody waits for those, the first of them is the call that fails: once. Any other failure is raised as it is.
  OperationFailed reported(Failure failure, const Descriptor& call);
  // The program has the error of this call: no other call raises it.
  void set_reported(const Descriptor& call);
  // Send or receive a small message if that is possible in so many looks; the peer's group rank if it was.
  std::optional<int> message_at_once(const MessageRequest& request, int looks = 1);
  // As message_at_once(), for an asynchronous message.
  std::optional<int> start_at_once(const MessageRequest& request);

  // Watch over a task that a call, which has ended, has queued on a device, until it has completed. It fails, and ends
  // the group, at its deadline, when a member is lost, and with the group.
  std::shared_ptr<GroupOperation> follow(const Descriptor& call, std::shared_ptr<Task> task, double seconds,
                                         bool is_unawaited = false, std::optional<Recording> recording = {});
  // Watch over a task that is part of a graph of work on a device, until the graph is gone. When it runs for long, it
  // fails as the task of a call does that has begun then.
  void watch_replays(const Descriptor& call, std::shared_ptr<Task> task, double seconds);
  // Called once, when a failure ends the group, from any thread. Set before the first call.
  void on_broken(std::function<void()> end_device_work) { end_device_work_ = std::move(end_device_work); }

  // The engine calls its ranks by other numbers now. Before the first call.
  void rename_ranks();
  // Make reductions combine in the order of the group's ranks. Before the first call; all ranks must agree.
  void reduce_in_rank_order() { ordered_ = true; }
  bool reduces_in_rank_order() const { return ordered_; }
  // Whether a member has ended out of order, as far as is known, whatever became of its calls.
  bool has_lost_member() const;
  // The member by whose end the group broke: kLost, with the summary as its reason; nothing where it did not.
  std::optional<Failure> lost() const;
  // Whether a collective's elements are sent beside the announcement, so that nothing is left to be moved when the
  // ranks have agreed. The same on all ranks.
  bool is_announced_whole(const Descriptor& call) const;
  // The name of the schedule of the last collective, when it has completed; "small" where it needed none. For tests.
  const char* last_schedule() const;

  // The line of the program that made this call on this rank, and, of a collective, by group rank on all members, as in
  // "/home/me/train.py:12"; empty where it is not known. The latter waits for those of other hosts, for at most 0.3 s.
  std::string source_line(const Descriptor& call) const { return engine_.source_line(engine_.rank(), call); }
  std::vector<std::string> source_lines(const Descriptor& call) const;
  Engine::Place place_of(const Descriptor& call) const { return engine_.place_of(call); }

  // Whether a failure has ended the group, or this rank has left it.
  bool is_completed() const { return completed_.load(std::memory_order_acquire); }
  // Whether all asynchronous operations have completed.
  bool is_idle();
  // Leave in order, or after a failure: pending calls fail. Idempotent; from one thread.
  void leave();
  // The failure of a call that nobody waited for and that no call has raised: the program does not know it.
  std::optional<OperationFailed> take_unraised();
  // End this group on every member: running calls fail at once.
  void abort();
  // This rank does not come to a call because of an error of its program: end the group on every member, with `reason`.
  // `call` is the call that this rank would issue next.
  void fail_call(Descriptor call, std::string reason);
  Progress advance_pending() override;
  void examine_pending() override;
  int64_t longest_sleep_ns() override;
  bool note_pending() override;
  std::optional<size_t> open_receives(const Operation& waited, const std::vector<int>& awaited) override;

 private:
  static size_t index(int rank) { return static_cast<size_t>(rank); }
  static constexpr size_t kFewMessages = 64;
  static constexpr int kReceiveCredits = 4;
  // Looks for a message, of 7 us together: a peer that begins to send at the same time has sent by then.
  static constexpr int kReceivePolls = 120;

  friend class DeviceOperation;
  friend class GroupOperation;
  friend class QueuedCall;
  friend class MessageOperation;

  // The right to run a call in the caller's thread; given back at the end of the scope.
  class Turn {
   public:
    explicit Turn(Group& group) : group_(group) {}
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { group_.finish_turn(); }

   private:
    Group& group_;
  };

  void name_ranks_as_engine();
  void retire();
  AtOnce try_message(const MessageRequest& request);
  AtOnce try_receive_from_any(MessageRequest& request);
  std::string unread(const MessageRequest& request) const;
  void run_queued(const Request& request, double seconds, LanguageRuntime& language);
  void break_with_unseen_mismatch();
  void mark_left();
  [[noreturn]] void refuse_to_begin(const Failure& failure);  // which has world ranks
  std::optional<Failure> misplaced(const std::vector<uint64_t>& offsets) const;
  void announce_leaving();
  std::optional<Failure> what_ends(const GroupOperation& operation);
  void look_at_replays(Failure& failure, const Descriptor& call);
  void require_usable(Descriptor call, const GroupOperation* last_queued = nullptr);
  void number(Descriptor& call);
  std::shared_ptr<GroupOperation> conclude(const Request& request, const CollectiveCall& call, double seconds,
                                           const Recording& recording);
  void finish_turn();
  [[nodiscard]] std::vector<std::shared_ptr<GroupOperation>> sweep_messages();
  bool has_device_work();
  bool has_unfinished_device_calls();
  static bool may_rest(const GroupOperation& message);
  std::optional<Failure> complete_watched(Operation& operation, const Descriptor& call,
                                          const std::function<std::optional<Awaited>()>& awaited, double seconds,
                                          LanguageRuntime& language);
  std::vector<int> world_ranks(std::vector<int> members) const;
  void record_awaited(const Descriptor& call, const std::vector<int>& missing) const;
  void report_wait(WaitReport& report, const Operation& operation, const Descriptor& call, double seconds) const;
  std::optional<Awaited> awaited(const Operation& operation, const Descriptor& call) const;
  void name_relays(Failure& failure, const Descriptor& call) const;
  std::optional<Failure> examine(const Operation& operation, const Descriptor& call) const;
  std::optional<Failure> examine_member(int member, const std::vector<int>& missing, const Descriptor& call) const;
  std::optional<Failure> posted(int member) const;
  std::optional<Failure> examine_connection(int member) const;
  std::optional<Failure> examine_relays(const std::vector<int>& missing, const Descriptor& call) const;
  bool has_left(int member, const Descriptor& call) const;
  bool can_relay(const Descriptor& call) const;
  std::optional<Failure> examine_handshake(int member, bool awaited, const Descriptor& call) const;
  void end_pending();
  bool is_local(int member) const { return state_ && state_->topology.is_local(member); }
  bool spans_hosts() const { return state_ && state_->topology.spans_hosts(); }
  void make_relay();
  GroupView view() const { return {options_.id, options_.rank, options_.members, global_ranks_}; }
  Failure left_before(int member) const;
  std::vector<int> explained_peers(const Failure& failure, bool has_world_ranks) const;
  // The members of this host whose processes are stopped, for a transfer that does not say for whom it waits.
  std::vector<int> stopped_members() const;
  void look_at_calls(const std::vector<int>& peers);
  void explain(Failure& failure, bool has_world_ranks = false);
  void break_with(Failure failure, const Descriptor& call);
  Descriptor first_without_this_rank(const Descriptor& call) const;
  bool has_turn(const GroupOperation& operation);  // with driving_
  void end_with(const GroupOperation& call, const Failure& failure);
  void give_up(GroupOperation& operation, Failure failure);
  std::optional<Awaited> unless_failed(const Operation& operation, const Descriptor& call,
                                       std::optional<Awaited> awaited) const;
  std::optional<Failure> find_deadlock(DeadlockDetector& watch, const Operation& operation,
                                       const std::function<std::optional<Awaited>()>& awaited,
                                       LanguageRuntime& language);
  Failure own_view(Failure failure) const;
  Failure cause_of(Failure failure) const;
  void add_own_wait(Failure& failure, std::vector<int> awaited) const;
  std::optional<Failure> broken() const;
  std::optional<Descriptor> first_unawaited();
  void keep_unreported(Failure failure, Descriptor call, bool is_unawaited);
  bool is_kept(const Descriptor& call) const;  // with reason_mutex_
  std::pair<std::shared_ptr<GroupOperation>, bool> enqueue(Request request, double seconds);
  void run_along(const GroupOperation& operation);
  bool announce(GroupOperation& operation);
  void leave_to_progress_thread(const GroupOperation& operation, bool wakes);
  Progress advance_queue(const GroupOperation* own = nullptr);
  Progress advance_head(const GroupOperation* own);
  Progress advance_messages();
  Progress advance_devices();
  bool follow_replays();
  int group_rank(int world_rank) const;
  Descriptor describe(const MessageRequest& request);

  Engine& engine_;
  GroupOptions options_;
  std::vector<int> global_ranks_;
  uint64_t offset_ = 0;
  std::pair<uint64_t, size_t> proxies_{};  // of a leader: offset and bytes
  std::vector<const Arena*> arenas_;       // by group rank
  std::optional<CollectiveState> state_;
  bool announced_ = false;  // other ranks know the offset of its memory
  bool created_ = false;
  std::vector<uint64_t> refused_;
  bool ordered_ = false;
  std::atomic<uint64_t> sequence_{0};          // of the last collective that has started; written in its turn
  std::atomic<uint64_t> message_sequence_{0};  // of the last message that was issued
  std::atomic<uint64_t> ended_{0};             // of the last collective whose turn has ended
  std::atomic<bool> busy_{false};              // a call is running
  std::atomic<int> queued_{0};                 // calls in queue_
  // The messages that tasks are to move and have not moved, in the order in which they started; and how many
  // messages on devices have been matched of each member. Guarded by the mutex of messages.
  std::vector<const MessageOperation*> external_messages_;
  std::vector<uint64_t> matched_;
  std::mutex queue_mutex_;  // guards queue_, messages_, device_queues_ and captured_
  std::deque<std::shared_ptr<GroupOperation>> queue_;
  std::vector<std::shared_ptr<MessageOperation>> messages_;  // completed ones stay for a while
  // Tasks on a device, of collectives, and of messages from and to each member. Those of a queue complete in order, so
  // only the first is looked at.
  std::map<std::pair<OpKind, int>, std::deque<std::shared_ptr<GroupOperation>>> device_queues_;
  struct CapturedCall {
    Descriptor call;
    std::shared_ptr<Task> task;
    double seconds;
    std::weak_ptr<GroupOperation> followed{};  // while it runs for long
  };
  std::vector<CapturedCall> captured_;
  RunningReplays replays_{.are_all = true};   // of these, as the flight record has them
  std::atomic<bool> has_used_device_{false};  // whether there are any of these, without the mutex
  std::function<void()> end_device_work_;
  size_t crowded_ = kFewMessages;                      // messages_ is swept when it is as long as this
  std::atomic<int> receive_credits_{kReceiveCredits};  // see start_at_once()
  int looked_first_at_ = 0;                            // see try_receive_from_any(); with the mutex of the messages
  uint64_t looked_at_ = 0;                             // the last message that the progress thread has looked at
  std::atomic<bool> completed_{false};                 // broken or left; reason_ says why
  std::unique_ptr<FailureBoard> board_;
  mutable std::mutex reason_mutex_;
  std::optional<Failure> reason_;
  std::optional<Failure> lost_;  // kLost, where the end of a member broke the group; guarded by reason_mutex_
  std::optional<OperationFailed> unreported_;  // a call that has ended the group; guarded by reason_mutex_, as the next
  bool is_unawaited_ = false;                  // nobody waits for that call
  bool is_reported_ = false;                   // a call has raised what ended the group
  std::map<int, std::string> seen_calls_;      // by world rank; guarded by reason_mutex_
  bool left_ = false;
  std::mutex driving_;                        // held to advance the head of queue_; taken before other mutexes
  bool head_has_turn_ = false;                // guarded by driving_: busy_ is held for the head of queue_
  std::atomic<bool> has_missed_look_{false};  // a thread could not look, because another one had driving_
};

// An operation of a group that may outlive the call which issued it.
class GroupOperation : public Operation {
 public:
  // `bytes`: that the call moves, as far as a thread that waits for it needs to know.
  GroupOperation(Group& group, size_t bytes, double seconds)
      : group_(group), bytes_(bytes), seconds_(seconds), budget_(WaitPolicy{}, Deadline::after(seconds)) {}

  Group& group() const { return group_; }
  size_t bytes() const { return bytes_; }
  double seconds() const { return seconds_; }
  Deadline deadline() const { return budget_.deadline(); }
  virtual Descriptor call() const = 0;
  virtual int source() const { return -1; }  // completed receives: the sender's group rank
  // As call(), from any thread, also while another one gives the call its number.
  virtual Descriptor call_so_far() const { return call(); }
  // No caller waits for it: see Request. A caller that has taken the stream on which it is queued does not, either.
  void set_unawaited() { unawaited_.store(true, std::memory_order_relaxed); }
  bool is_unawaited() const { return unawaited_.load(std::memory_order_relaxed); }
  virtual bool is_replay() const { return false; }  // of a call in a CUDA graph
  // Once it has completed: what goes on on a device; null where nothing does.
  const std::shared_ptr<GroupOperation>& device_work() const { return device_work_; }
  // The world ranks without which it cannot end; nothing where that is not known. Takes locks.
  virtual std::optional<Awaited> awaited() { return std::nullopt; }
  // What it may do while it is pending and a thread of this rank waits for another operation, which awaits these world
  // ranks.
  enum class Beside : uint8_t {
    kNothing,      // that another rank could wait for
    kOpenReceive,  // see Source::open_receives
    kAnything,
  };
  virtual Beside beside(const std::vector<int>& /*awaited*/) const { return Beside::kAnything; }
  // Of the thread that examines it.
  WaitBudget& budget() { return budget_; }
  WaitReport& wait_report() { return wait_report_; }
  // Somebody is to be told of its end, though no thread waits for it.
  void watch();
  bool is_watched() const { return watched_.load(std::memory_order_relaxed); }

 protected:
  Group& group_;
  const size_t bytes_;
  const double seconds_;

  void queue(std::shared_ptr<GroupOperation> device_work) { device_work_ = std::move(device_work); }

 private:
  std::shared_ptr<GroupOperation> device_work_;
  std::atomic<bool> watched_{false};
  std::atomic<bool> unawaited_{false};
  WaitBudget budget_;
  WaitReport wait_report_;
};

}  // namespace procgroup
