// A collective over messages, for ranks that share no memory.
//
//     agree    all ranks exchange the descriptor, and with it what is small                  (mesh_agreement.hpp)
//     finish   small: reduce or copy what came, in rank order
//     run      large: execute a schedule                                                  (algorithms/mesh_plan.hpp)
//
// A rank whose call fails before its end, except by a mismatch, which every rank sees by itself, tells the others
// (notifications.hpp). Whatever the size, elements are reduced in rank order.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/group_view.hpp"
#include "collectives/network_agreement.hpp"
#include "collectives/network_executor.hpp"
#include "messages/messages.hpp"
#include "ops/request.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

// Equal on all ranks of a group.
struct NetworkLimits {
  size_t small_bytes = 4 * 1024;  // of elements that travel with the descriptor; below kEagerBytes
  size_t segment_bytes = 256 * 1024;
};

// What the calls of one group share. Made, used and destroyed under the mutex that guards Messages.
class NetworkState {
 public:
  NetworkState(Messages& through, GroupView members, NetworkLimits within = {});

  MessageKey key(uint64_t purpose, uint64_t sequence) const;

  Messages& messages;
  const GroupView group;
  const NetworkLimits limits;
};

// Made, advanced, given up and destroyed under the mutex that guards Messages; advance() follows a pump().
// The ranks in failure() and missing() are group ranks. The state, the request and its arrays outlive the call.
class NetworkCall final : public Operation {
 public:
  NetworkCall(NetworkState& state, const Request& request) : state_(state), request_(request) {}
  ~NetworkCall() override { release(); }

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
  void take_blocks();
  void reduce_all();
  void start_run();
  Failure translated(Failure failure) const;
  bool may_have_written() const { return phase_ == Phase::kRun && !request_.after; }
  Progress succeed();
  Progress fail_for(Failure failure);
  void release();

  NetworkState& state_;
  const Request& request_;
  Phase phase_ = Phase::kStart;
  std::optional<NetworkAgreement> agreement_;
  std::optional<NetworkExecutor> run_;
};

}  // namespace procgroup
