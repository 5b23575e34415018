// The members of a group: their ranks, the memory that they share, and what each has posted of its end.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collective_call.hpp"
#include "collectives/relay.hpp"
#include "group/engine.hpp"
#include "group/failure_board.hpp"

namespace procgroup {

class Group;

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

class Members {
 public:
  // Take this rank's group memory.
  Members(Group& group, Engine& engine, GroupOptions& options);
  Members(const Members&) = delete;
  // Publish to the members of this host that this rank reads no more; free its memory once they have published the
  // same.
  void close();

  // By group rank; empty where they are the group ranks.
  const std::vector<int>& global_ranks() const { return global_ranks_; }
  // Take the numbers that the engine gives its ranks.
  void adopt_ranks();
  int group_rank(int world_rank) const;
  // The offset of this rank's group memory in its arena.
  uint64_t offset() const { return offset_; }
  // `offsets`: those of the members on this host, by group rank.
  void attach(const std::vector<uint64_t>& offsets);
  // The failure of a member that announced an invalid offset of its group memory, with a world rank.
  std::optional<Failure> misplaced(const std::vector<uint64_t>& offsets) const;
  // Other ranks know the offset of this rank's memory; all members have sent that they make the group.
  void set_announced() { announced_ = true; }
  void set_created() { created_ = true; }
  bool is_created() const { return created_; }
  // The state of collectives; nothing before attach().
  std::optional<CollectiveState>& state() { return state_; }
  bool is_local(int member) const { return state_ && state_->topology.is_local(member); }
  GroupView view() const { return {options_.id, options_.rank, options_.members, global_ranks_}; }
  bool spans_hosts() const { return state_ && state_->topology.spans_hosts(); }

  // How a member's part in the group has ended: every wait looks for that here. `by_connection`: also by the end of its
  // connection, where another backend moves the bytes and no transfer of the engine's fails by it.
  std::optional<MemberEnd> end_of(int member, bool by_connection = false) const;
  // Parts of that: the end of its process; why its part in the group has failed, as it has posted that; and what a call
  // says that a member which has left in order does not make.
  std::optional<MemberEnd> process_end(int member) const;
  std::optional<Failure> posted(int member) const;
  Failure left_before(int member) const;
  // Post why this rank's part in the group has failed, or that it left after it completed collective number `last`.
  void post(const Failure& failure);
  void announce_leaving(uint64_t last);
  void post_source_lines(const Descriptor& call) const;
  // Whether a member has ended out of order, as far as is known, whatever became of its calls.
  bool has_lost_member() const;
  // The line of the program that made this call, by group rank. Waits for those of other hosts, for at most 0.3 s.
  std::vector<std::string> source_lines(const Descriptor& call) const;

 private:
  std::optional<Failure> disconnected(int member) const;
  std::optional<MemberEnd> end_by_handshake(int member) const;
  void make_relay();
  void retire();

  Group& group_;
  Engine& engine_;
  GroupOptions& options_;
  std::vector<int> global_ranks_;
  uint64_t offset_ = 0;
  std::pair<uint64_t, size_t> proxies_{};  // of a leader: offset and bytes
  std::vector<const Arena*> arenas_;       // by group rank
  std::optional<CollectiveState> state_;
  std::unique_ptr<FailureBoard> board_;
  bool announced_ = false;
  bool created_ = false;
};

}  // namespace procgroup
