// Executes the schedule of one call: over its arrays and the slots of all members.
#pragma once

#include <optional>

#include "base/copy.hpp"
#include "collectives/shared_state.hpp"
#include "ops/request.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

struct BufferEntry;

class SharedExecutor {
 public:
  SharedExecutor(SharedState& state, const Request& request) : state_(state), request_(request) {}

  // Before all ranks have announced the call: make copies in in slots that nobody reads any more, up to the first time
  // that the schedule publishes.
  void copy_in();
  // Do what can be done now; true when the schedule is done.
  bool advance();
  // What ended the schedule; nothing as long as it can go on.
  const std::optional<Failure>& failure() const { return failure_; }
  size_t steps_done() const { return step_; }
  // Whether the schedule cannot go on before this rank publishes.
  bool awaits(int rank) const;

 private:
  bool is_free(int slot);
  bool run(const Step& step);
  void note_copy_in(const Place& to);
  void run_copy(const Step& step);
  void run_reduce(const Step& step);
  bool run_read(const Step& step);
  bool run_read_reduce(const Step& step);
  bool read(void* to, const Place& from, size_t bytes, CopyFunction copy);
  CopyFunction copy_into(const Place& to) const;
  bool stay_stalled();
  const BufferEntry& entry(const Place& place) const;
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
