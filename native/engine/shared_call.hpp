// A collective through shared memory: announce, agree, then execute a plan.
//
//     announce   my line carries the fingerprint of my call, and small data with it
//     agree      all lines of this sequence number are there, and their fingerprints are equal
//     finish     small: combine what lies beside the lines; large: run the plan over the slots
//
// Nothing is written into an output before all ranks are known to agree.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/slot_plan.hpp"
#include "engine/operation.hpp"
#include "engine/request.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {

class Arena;

// What the calls of one group share. One call runs at a time.
struct SharedState {
  int rank;
  GroupLayout layout;
  std::vector<GroupMemoryView> members;     // by group rank
  const std::vector<const Arena*>* arenas;  // by group rank; to wake sleepers
  uint64_t progress = 0;                    // what every rank had published when the last call ended
  uint64_t chunks = 0;                      // of all calls that ended
  SlotPlan plan;                            // reused from call to call
  std::vector<const void*> sources;         // scratch for reduce
  size_t direct_bytes;                      // all_reduce above two ranks is direct up to here
  size_t exchanged_bytes;                   // all_reduce of two ranks is exchanged from here on

  int size() const { return static_cast<int>(members.size()); }
  GroupMemoryView& mine() { return members[static_cast<size_t>(rank)]; }
  void wake_peers() const;
};

class SharedCall final : public Operation {
 public:
  SharedCall(SharedState& state, const Request& request);

  Progress advance() override;
  std::vector<int> missing() const override;

 private:
  enum class Phase : uint8_t { kAnnounce, kAgree, kExecute };

  void announce();
  bool agree();  // true when every rank has arrived and agrees, or when the call has failed
  void report_mismatch();
  void finish_small();
  void plan();
  void plan_all_reduce(SlotPlanRequest wanted);
  bool execute();  // true when the plan is done
  bool run(const Step& step);
  void run_reduce(const Step& step);
  bool reached(int rank, uint64_t value) const;
  std::byte* address(const Place& place) const;

  SharedState& state_;
  const Request& request_;
  Phase phase_ = Phase::kAnnounce;
  bool mismatch_ = false;
  int next_ = 0;  // the rank whose arrival or progress is awaited
  size_t step_ = 0;
  uint64_t fingerprint_;
  int64_t mismatch_since_ns_ = 0;
};

}  // namespace procgroup
