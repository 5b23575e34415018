// A collective through shared memory: announce, agree, then finish.
//
//     announce   my line carries the fingerprint of my call, and small data with it; all_to_all: my sheet; large: the
//                first chunk is in a slot already, where it is sure to go there and the slot is free
//     agree      all lines of this sequence number are there, and their fingerprints are equal; all_to_all: every block
//                is as long as its receiver expects, for all pairs of ranks, so that all ranks come to one verdict
//     finish     small: combine what lies beside the lines; large: run a schedule over the slots
//
// Nothing is written into an output before all ranks are known to agree.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/shared_executor.hpp"
#include "collectives/shared_state.hpp"
#include "ops/request.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

class SharedCall final : public Operation {
 public:
  SharedCall(SharedState& state, const Request& request);

  Progress advance() override;
  std::vector<int> missing() const override;
  void give_up(Failure failure) override;

 private:
  enum class Phase : uint8_t { kAnnounce, kAgree, kExecute };

  Progress advance_phase();
  void announce();
  void expose_and_copy_in();
  void take_slots();
  bool agree();  // true when every rank has arrived and agrees, or when the call has failed
  void report_mismatch();
  void compare_pairs();
  bool is_small() const;
  void finish_at_once();
  Progress execute();
  void conclude();

  SharedState& state_;
  const Request& request_;
  SharedExecutor run_;
  Phase phase_ = Phase::kAnnounce;
  bool scheduled_ = false;
  bool mismatch_ = false;
  int next_ = 0;  // the rank whose arrival is awaited
  uint64_t fingerprint_;
  int64_t mismatch_since_ns_ = 0;
};

}  // namespace procgroup
