// Executes a RingPlan over Messages, a little at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "algorithms/ring.hpp"
#include "engine/group_view.hpp"
#include "engine/messages.hpp"
#include "transport/descriptor.hpp"

namespace procgroup {

class RingRun {
 public:
  // The arrays and the group outlive the run. `outputs` is indexed by RingPlace::rank.
  RingRun(Messages& messages, const GroupView& group, const Descriptor& call, MessageKey key, RingPlan plan,
          const void* input, const std::vector<void*>& outputs);
  ~RingRun();  // gives up what still runs: the arrays are not touched afterwards
  RingRun(const RingRun&) = delete;
  RingRun& operator=(const RingRun&) = delete;

  // Progress::kDone when all steps are done or one failed; then failure() tells, with a world rank.
  Progress advance();
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }
  std::vector<int> missing() const;  // group ranks

 private:
  // A transfer that runs, and the memory that it reads or writes.
  struct Flight {
    std::shared_ptr<Transfer> transfer;
    int peer;  // group rank
    const std::byte* begin;
    size_t bytes;
    bool writes;
  };

  void land();
  bool must_wait(const RingStep& step) const;
  void issue(const RingStep& step);
  void compute(const RingStep& step);
  void launch(const RingStep& step);
  size_t element_bytes(const RingPlace& place) const;
  std::byte* address(const RingPlace& place) const;

  Messages& messages_;
  const GroupView& group_;
  const Descriptor& call_;
  const MessageKey key_;
  const RingPlan plan_;
  const void* input_;
  const std::vector<void*>& outputs_;
  std::unique_ptr<std::byte[]> partial_;
  std::unique_ptr<std::byte[]> result_;
  size_t next_ = 0;  // step
  std::vector<Flight> flights_;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
