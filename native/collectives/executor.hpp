// Executes the schedule of one call step by step: on its arrays, the slots of this host's ranks, and messages.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "base/copy.hpp"
#include "collectives/state.hpp"
#include "ops/request.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

struct BufferEntry;

class Executor {
 public:
  Executor(CollectiveState& state, const Request& request) : state_(state), request_(request) {}
  ~Executor() { cancel_transfers(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Before all ranks have announced the call: copy into slots that no peer reads any more, up to the first step of the
  // schedule that publishes.
  void copy_in();
  // Do what can be done now; true when the schedule is done.
  bool advance();
  // The failure that ended the schedule, with group ranks; null while it can go on.
  const Failure* failure() const { return failure_.get(); }
  // Grows whenever a step or a transfer is done.
  size_t done() const { return step_ + completed_transfers_; }
  // Changes whenever elements have moved: done(), and what the running transfers have moved.
  uint64_t moved() const;
  // Whether the schedule cannot go on before this rank acts.
  bool awaits(int rank) const;
  // Give up all transfers that run: the arrays are not touched afterwards.
  void cancel_transfers();

 private:
  struct Memory {
    const std::byte* begin = nullptr;
    size_t bytes = 0;
  };
  // A transfer that runs, and the memory that it reads or writes.
  struct Running {
    std::shared_ptr<Transfer> transfer;
    int peer;  // group rank
    Memory memory;
    bool writes;
  };

  bool is_free(int slot);
  bool run_steps();
  bool run(const Step& step);
  void note_copy_in(const Place& to);
  void run_copy(const Step& step);
  void run_reduce(const Step& step);
  void reduce_sources(const Step& step, void* to, size_t count);
  bool run_read(const Step& step);
  bool run_read_reduce(const Step& step);
  bool run_transfer(const Step& step);
  void reap_transfers(bool pump);
  bool must_wait(const Step& step) const;
  Memory written_by(const Step& step) const;
  std::array<Memory, 2> read_by(const Step& step) const;
  bool is_scattered(const Place& place) const;
  bool read(void* to, const Place& from, size_t bytes, CopyFunction copy);
  CopyFunction copy_into(const Place& to) const;
  bool stay_stalled();
  const BufferEntry& entry(const Place& place) const;
  const std::byte* mapped(const Place& place, size_t bytes) const;
  bool counts(int rank);
  bool reached(int index, uint64_t value) const;
  std::byte* address(const Place& place) const;

  CollectiveState& state_;
  const Request& request_;
  size_t step_ = 0;
  int stalled_on_ = -1;              // the rank whose array could not be read, because it gave up or ended
  int64_t unreadable_since_ns_ = 0;  // when that rank's array could not be read; zero when it gave up
  std::unique_ptr<const Failure> failure_;
  int next_ = 0;  // the rank of this host whose progress is awaited, in a step that awaits all ranks
  std::vector<Running> running_;
  size_t completed_transfers_ = 0;
};

}  // namespace procgroup
