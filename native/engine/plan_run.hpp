// Executes the plan of one call: over its arrays and the slots of all members.
#pragma once

#include <optional>

#include "base/copy.hpp"
#include "engine/failure.hpp"
#include "engine/request.hpp"
#include "engine/shared_state.hpp"

namespace procgroup {

struct SheetEntry;

class PlanRun {
 public:
  PlanRun(SharedState& state, const Request& request) : state_(state), request_(request) {}

  // Before all ranks have announced the call: make deposits in slots that nobody reads any more, up to the first time
  // that the plan publishes.
  void deposit();
  // Do what can be done now; true when the plan is done.
  bool advance();
  // What ended the plan; nothing as long as it can go on.
  const std::optional<Failure>& failure() const { return failure_; }
  size_t steps_done() const { return step_; }
  // Whether the plan cannot go on before this rank publishes.
  bool awaits(int rank) const;

 private:
  bool is_free(int slot);
  bool run(const Step& step);
  void note_deposit(const Place& to);
  void run_copy(const Step& step);
  void run_reduce(const Step& step);
  bool run_read(const Step& step);
  bool run_read_reduce(const Step& step);
  bool read(void* to, const Place& from, size_t bytes, CopyFunction copy);
  CopyFunction copy_into(const Place& to) const;
  bool stay_stalled();
  const SheetEntry& entry(const Place& place) const;
  const std::byte* mapped(const Place& place, size_t bytes) const;
  bool counts(int rank);
  bool reached(int rank, uint64_t value) const;
  std::byte* address(const Place& place) const;

  SharedState& state_;
  const Request& request_;
  size_t step_ = 0;
  int stalled_on_ = -1;              // the rank whose array could not be read, because it gave up or ended
  int64_t unreadable_since_ns_ = 0;  // when that rank's array could not be read; zero when it gave up
  std::optional<Failure> failure_;
  int next_ = 0;  // the rank whose progress is awaited, where everybody's is
};

}  // namespace procgroup
