// Executes a NetworkSchedule over Messages, a little at a time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/group_view.hpp"
#include "messages/messages.hpp"
#include "ops/request.hpp"
#include "schedules/network_schedules.hpp"

namespace procgroup {

class NetworkExecutor {
 public:
  // The request, its arrays and the group outlive the run.
  NetworkExecutor(Messages& messages, const GroupView& group, const Request& request, MessageKey key,
                  NetworkSchedule schedule);
  ~NetworkExecutor();  // gives up what still runs: the arrays are not touched afterwards
  NetworkExecutor(const NetworkExecutor&) = delete;
  NetworkExecutor& operator=(const NetworkExecutor&) = delete;

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
  bool must_wait(const NetworkStep& step) const;
  void launch(const NetworkStep& step);
  void compute(const NetworkStep& step);
  size_t bytes_of(size_t elements) const { return elements * dtype_size(request_.descriptor.dtype); }
  std::byte* address(const NetworkPlace& place) const;
  bool is_scattered(const NetworkPlace& place) const;
  Memory written_by(const NetworkStep& step) const;
  std::array<Memory, 2> read_by(const NetworkStep& step) const;

  Messages& messages_;
  const GroupView& group_;
  const Request& request_;
  const MessageKey key_;
  const NetworkSchedule schedule_;
  std::unique_ptr<std::byte[]> scratch_;
  size_t next_ = 0;  // step
  std::vector<Flight> flights_;
  std::vector<const void*> sources_;
  std::optional<Failure> failure_;
};

}  // namespace procgroup
