// A collective over messages, for ranks that share no memory.
//
//     agree    all ranks exchange the descriptor, and with it what is small                  (mesh_agreement.hpp)
//     finish   small: reduce or copy what came, in rank order
//     run      large: execute a plan                                                  (algorithms/mesh_plan.hpp)
//
// A rank whose call fails before its end, except by a mismatch, which every rank sees by itself, tells the others
// (notices.hpp). Whatever the size, elements are reduced in rank order.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "engine/group_view.hpp"
#include "engine/mesh_agreement.hpp"
#include "engine/mesh_run.hpp"
#include "engine/messages.hpp"
#include "engine/notices.hpp"
#include "engine/operation.hpp"
#include "engine/request.hpp"

namespace procgroup {

// Equal on all ranks of a group.
struct MeshLimits {
  size_t small_bytes = 4 * 1024;  // of elements that travel with the descriptor; below kEagerBytes
  size_t segment_bytes = 256 * 1024;
};

// What the calls of one group share. Made, used and destroyed under the mutex that guards Messages.
class MeshState {
 public:
  MeshState(Messages& through, GroupView members, MeshLimits within = {});

  MessageKey key(uint64_t purpose, uint64_t sequence) const;

  Messages& messages;
  const GroupView group;
  const MeshLimits limits;
  Notices notices;
};

// Made, advanced, given up and destroyed under the mutex that guards Messages; advance() follows a pump().
// The ranks in failure() and missing() are group ranks. The state, the request and its arrays outlive the call.
class MeshCall final : public Operation {
 public:
  MeshCall(MeshState& state, const Request& request) : state_(state), request_(request) {}
  ~MeshCall() override { release(); }

  Progress advance() override;
  std::vector<int> missing() const override;
  // The group ranks that have not come to this call, when it cannot do anything before they do.
  std::vector<int> absent() const {
    return phase_ == Phase::kAgree && agreement_ ? agreement_->absent() : std::vector<int>{};
  }
  void give_up(Failure failure) override;

 private:
  enum class Phase : uint8_t { kStart, kAgree, kRun };

  const Descriptor& call() const { return request_.descriptor; }
  int rank() const { return state_.group.rank; }
  void start();
  Progress advance_agreement();
  bool everything_rides() const;
  void take_what_rode();
  void take_pieces();
  void reduce_all();
  void start_run();
  Failure cause_of(const Failure& loss) const;
  Failure translated(Failure failure) const;
  bool may_have_written() const { return phase_ == Phase::kRun && !request_.after; }
  bool heard_notice(uint64_t sequence);
  Progress succeed();
  Progress fail_for(Failure failure);
  void release();

  MeshState& state_;
  const Request& request_;
  Phase phase_ = Phase::kStart;
  std::optional<MeshAgreement> agreement_;
  std::optional<MeshRun> run_;
};

}  // namespace procgroup
