// A collective over messages, for ranks that share no memory.
//
//     agree    all ranks exchange the descriptor, and with it the elements of a small call   (mesh_agreement.hpp)
//     finish   small: reduce or copy what came, in rank order
//     run      large: execute a plan over the ring                                           (algorithms/ring.hpp)
//
// A rank whose call fails before its end, except by a mismatch, which every rank sees by itself, sends the
// others a *notice*. So a rank that awaits a healthy neighbour learns of a loss further along the ring.
//
// Small calls combine in rank order, large ones in the order of the ring; either way all ranks hold the same bits.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "engine/group_view.hpp"
#include "engine/mesh_agreement.hpp"
#include "engine/messages.hpp"
#include "engine/operation.hpp"
#include "engine/ring_run.hpp"
#include "transport/descriptor.hpp"

namespace procgroup {

// Equal on all ranks of a group.
struct MeshLimits {
  size_t small_bytes = 4 * 1024;  // of elements that travel with the descriptor; below kEagerBytes
  size_t segment_bytes = 256 * 1024;
};

// Made, advanced, given up and destroyed under the mutex that guards Messages; advance() follows a pump().
// The ranks in failure() and missing() are group ranks. The arrays outlive the call.
class MeshCall final : public Operation {
 public:
  // `output` is written by all_reduce, by broadcast on all ranks, and by reduce on the root; `outputs`, one
  // address per rank, by all_gather. The input may be the same address as the output, or as outputs[rank].
  MeshCall(Messages& messages, GroupView group, const Descriptor& call, const void* input, void* output,
           std::vector<void*> outputs, MeshLimits limits = {});
  ~MeshCall() override;

  Progress advance() override;
  std::vector<int> missing() const override;
  void give_up(Failure failure) override;

 private:
  enum class Phase : uint8_t { kStart, kAgree, kRun };
  // What one rank tells the others when its call failed.
  struct Notice {
    Failure::Kind kind;
    uint8_t pad[3];
    int32_t peer;  // kLost: the group rank
    int64_t pid;
    char reason[240];
  };

  MessageKey key(uint64_t purpose) const;
  void start();
  Progress finish_small();
  void reduce_small();
  void start_run();
  bool heard_notice();
  void notify(const Failure& failure);
  Progress end_with(Failure failure);
  void release();
  Failure in_group_ranks(Failure failure) const;

  Messages& messages_;
  const GroupView group_;
  const Descriptor call_;
  const void* const input_;
  std::vector<void*> outputs_;  // all_gather: one per rank; else only the first is used
  const MeshLimits limits_;
  Phase phase_ = Phase::kStart;
  Notice notice_{};
  std::shared_ptr<Transfer> notice_receive_;
  std::optional<MeshAgreement> agreement_;
  std::optional<RingRun> run_;
};

}  // namespace procgroup
