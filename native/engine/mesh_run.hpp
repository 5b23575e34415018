// Executes a MeshPlan over Messages, a little at a time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "algorithms/mesh_plan.hpp"
#include "engine/group_view.hpp"
#include "engine/messages.hpp"
#include "engine/request.hpp"

namespace procgroup {

class MeshRun {
 public:
  // The request, its arrays and the group outlive the run.
  MeshRun(Messages& messages, const GroupView& group, const Request& request, MessageKey key, MeshPlan plan);
  ~MeshRun();  // gives up what still runs: the arrays are not touched afterwards
  MeshRun(const MeshRun&) = delete;
  MeshRun& operator=(const MeshRun&) = delete;

  // Progress::kDone when all steps are done or one failed; then failure() tells, with a world rank.
  Progress advance();
  const Failure* failure() const { return failure_ ? &*failure_ : nullptr; }
  std::vector<int> missing() const;  // group ranks

 private:
  struct Memory {
    const std::byte* begin = nullptr;
    size_t bytes = 0;
  };
  // A transfer that runs, and the memory that it reads or writes.
  struct Flight {
    std::shared_ptr<Transfer> transfer;
    int peer;  // group rank
    Memory memory;
    bool writes;
  };

  void land();
  bool must_wait(const MeshStep& step) const;
  void launch(const MeshStep& step);
  void compute(const MeshStep& step);
  size_t bytes_of(size_t elements) const { return elements * dtype_size(request_.descriptor.dtype); }
  std::byte* address(const MeshPlace& place) const;
  bool lies_in_parts(const MeshPlace& place) const;
  Memory written_by(const MeshStep& step) const;
  std::array<Memory, 2> read_by(const MeshStep& step) const;

  Messages& messages_;
  const GroupView& group_;
  const Request& request_;
  const MessageKey key_;
  const MeshPlan plan_;
  std::unique_ptr<std::byte[]> scratch_;
  size_t next_ = 0;  // step
  std::vector<Flight> flights_;
  std::vector<const void*> sources_;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
