// A collective: announce, agree, then finish.
//
//     announce   publish the fingerprint of this rank's call, and small data with it; all_to_all: its buffer table;
//                large: the first chunk is copied into a slot before, if it goes through slots in any case and the
//                slot is free
//     agree      all announcements of this sequence number have arrived, and their fingerprints are equal; all_to_all:
//                every block is as long as its receiver expects, for all pairs of ranks, so that all ranks find the
//                same result
//     finish     small: combine the data beside the announcements; large: run a schedule; external: advance the
//                task of another backend; between hosts, then confirm its success (collectives/confirmation.hpp)
//
// In a group that spans hosts the leader of each host relays announcements (collectives/relay.hpp); all else is the
// same. Nothing is written into an output before the ranks whose data it is made of are known to agree with this one.
//
// A *rooted* call, which is a small one on one host that has a root, waits for those ranks alone: the root of a
// broadcast for nobody, the others for the root; the root of a gather for all, the others for nobody. The other ranks'
// fingerprints are compared when they are there: before this rank announces its next calls, of which it may begin some
// while others lag, or when it leaves the group. A mismatch that is found then is that of the earlier call. A rank
// whose data is used must have made the same calls up to this one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/confirmation.hpp"
#include "collectives/executor.hpp"
#include "collectives/state.hpp"
#include "ops/request.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

// Whether a collective that is not by pair is small: its data is sent beside the announcement.
bool is_small(const CollectiveState& state, const Descriptor& call);
// Whether a call uses nothing but its announcement.
bool is_inline(const CollectiveState& state, const Descriptor& call);

// The mismatch in the first of this rank's calls up to `last`, as far as the other ranks' have come, that it has not
// compared with all of them; `running`: the first call that has not completed here.
std::optional<Failure> unseen_mismatch(const CollectiveState& state, uint64_t last, uint64_t running);

// Ranks in failures and in missing() are group ranks. The state, the request and its arrays outlive the call.
class CollectiveCall final : public Operation {
 public:
  CollectiveCall(CollectiveState& state, const Request& request);
  ~CollectiveCall() override;

  Progress advance() override;
  std::vector<int> missing() const override;
  void give_up(Failure failure) override;
  int64_t longest_sleep_ns() const override;
  uint64_t moved() const override { return phase_ == Phase::kExecute ? executor_.moved() : 0; }
  bool outlives_peer() const override { return is_transferring() && !confirmation_; }
  bool waits_in_chain() const override { return confirmation_.has_value(); }
  // Of a call that has succeeded: whether its task goes on, on a device.
  bool is_queued() const { return task_ == Task::State::kQueued; }

 private:
  enum class Phase : uint8_t { kAnnounce, kAgree, kExecute };

  void announce();
  void announce_external();
  void expose_and_copy_in();
  void take_slots();
  bool relay();         // whether anything moved
  bool may_announce();  // or when the call has failed
  bool finish_earlier();
  bool agree();  // true when all awaited ranks have arrived and agree, or when the call has failed
  bool compare(uint64_t sequence, bool awaits_all);
  bool awaits(int rank) const;
  void compare_pairs();
  std::vector<int> missing_in_earlier() const;
  bool is_small_call() const;
  bool is_transferring() const { return phase_ == Phase::kExecute && request_.descriptor.external; }
  Progress execute();
  Progress advance_task();
  bool has_dead_member() const;
  bool needs_confirmation() const;
  Progress confirm();
  void conclude();
  void cancel_messages();
  Failure translated(Failure failure) const;

  CollectiveState& state_;
  const Request& request_;
  Executor executor_;
  Phase phase_ = Phase::kAnnounce;
  const bool is_rooted_;
  bool scheduled_ = false;
  uint64_t mismatch_ = 0;            // the first call in which a rank is known to differ
  int next_ = 0;                     // the rank whose arrival is awaited
  std::vector<int> awaited_;         // the ranks that another backend waits for, where it names them
  std::optional<Task::State> task_;  // once it has been started
  std::optional<Confirmation> confirmation_;
  uint64_t fingerprint_;
  int64_t mismatch_since_ns_ = 0;
  uint32_t looks_ = 0;  // at another backend's task
};

}  // namespace procgroup
