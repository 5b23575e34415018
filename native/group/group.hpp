// One process group on this rank.
//
//     Group ── Members        their ranks, their memory, and what they have posted
//       ├───── Watch          what a call awaits, what ends it, and what the error says
//       ├───── GroupEnd       the failure that ended the group, and the call that reports it
//       ├───── CallQueue      collectives, in order
//       ├───── MessageQueue   messages, which have an order of their own per peer and tag
//       └───── DeviceWork     what calls have queued on a device
//
// Lock order: the progress thread's pass_, then CallQueue's driving_, then an operation's advancing_, then
// the mutex of CallQueue, of DeviceWork or MessageQueue, of the engine's messages, and of GroupEnd.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "group/call_queue.hpp"
#include "group/device_work.hpp"
#include "group/engine.hpp"
#include "group/group_end.hpp"
#include "group/group_operation.hpp"
#include "group/members.hpp"
#include "group/message_queue.hpp"
#include "group/watch.hpp"

namespace procgroup {

class Group final : public Source {
 public:
  Group(Engine& engine, GroupOptions options);
  ~Group() override;

  Engine& engine() const { return engine_; }
  uint64_t id() const { return options_.id; }
  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.members.size()); }
  int world_rank(int member) const { return options_.members[static_cast<size_t>(member)]; }
  const std::vector<int>& world_ranks() const { return options_.members; }
  Members& members() { return members_; }
  const Members& members() const { return members_; }
  Watch& watch() { return watch_; }
  GroupEnd& end() { return end_; }
  const GroupEnd& end() const { return end_; }
  CallQueue& calls() { return calls_; }
  const CallQueue& calls() const { return calls_; }
  MessageQueue& messages() { return messages_; }
  DeviceWork& devices() { return devices_; }

  // `offsets`: those of the group memory of the members on this host, by group rank. `hosts`: the host of each member.
  void attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts);
  // Instead of attach(), for a group of ranks that have a common group already: notify the other members, and wait
  // until each has sent that it makes the group, too. `call` describes the call. Throws OperationFailed, with world
  // ranks.
  void handshake(const std::string& call, double seconds, LanguageRuntime& language, uint32_t source = 0);
  // After handshake() failed by a mismatch: see GroupCreation.
  const std::vector<uint64_t>& refused() const { return refused_; }
  // The engine calls its ranks by other numbers now. Before the first call.
  void rename_ranks();

  // Whether all asynchronous operations have completed.
  bool is_idle() const;
  // Leave in order, or after a failure: pending calls fail. Idempotent; from one thread.
  void leave();
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
  [[noreturn]] void refuse_to_begin(const Failure& failure);  // which has world ranks

  Engine& engine_;
  GroupOptions options_;
  Members members_;  // before the queues, whose operations use the members' state until they are destroyed
  Watch watch_;
  GroupEnd end_{*this};
  CallQueue calls_{*this};
  MessageQueue messages_{*this};
  DeviceWork devices_{*this};
  std::vector<uint64_t> refused_;
  bool left_ = false;
};

}  // namespace procgroup
