// Blocks of one size in this rank's arena, exposed to groups for the data that they leave for their peers.
//
// A group *leases* a block when a call first needs one and keeps it from call to call, which costs one atomic
// exchange a call. When the pool has exposed all that it means to keep, another group's call takes over a block that
// is idle: no call of its group is running, and all peers have finished the last one. If no block is idle, one more
// is made, so that nobody ever waits for a block: calls of several groups that wait for each other cannot deadlock.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "transport/arena.hpp"

namespace procgroup {

class StagingPool {
 public:
  // `kept_blocks`: from how many blocks on to look for an idle one before making another.
  StagingPool(Arena& arena, size_t block_bytes, size_t kept_blocks)
      : arena_(arena), block_bytes_(block_bytes), kept_blocks_(kept_blocks) {}
  StagingPool(const StagingPool&) = delete;

  class Lease {
   public:
    // `is_done(n)` tells whether every peer has finished call n; called with the pool locked, from any thread.
    Lease(StagingPool& pool, std::function<bool(uint64_t)> is_done);
    Lease(const Lease&) = delete;
    ~Lease() { static_cast<void>(surrender()); }

    // The block's offset, for call `sequence`, to keep until end(). Throws std::system_error when memory is refused.
    uint64_t begin(uint64_t sequence) {
      State idle = State::kIdle;
      if (!state_.compare_exchange_strong(idle, State::kInUse, std::memory_order_acquire)) acquire();
      sequence_ = sequence;
      return offset_;
    }
    // The call has completed on this rank. After a call that failed it may be left out: the block then stays in use.
    void end() {
      if (state_.load(std::memory_order_relaxed) == State::kInUse)
        state_.store(State::kIdle, std::memory_order_release);
    }
    // End the lease without giving the block back: peers may still read it. Its offset; 0 when there is none.
    uint64_t surrender();
    StagingPool& pool() const { return pool_; }

   private:
    friend class StagingPool;
    // kBusy: the pool is looking at it.
    enum class State : uint32_t { kNone, kIdle, kInUse, kBusy };
    void acquire();

    StagingPool& pool_;
    const std::function<bool(uint64_t)> is_done_;
    std::atomic<State> state_{State::kNone};  // acquired and released around the two below
    uint64_t offset_ = 0;
    uint64_t sequence_ = 0;
  };

  // A block that nobody reads or writes any more.
  void give_back(uint64_t offset);
  // How many blocks are reserved, exposed or not.
  size_t blocks() const {
    const std::lock_guard lock(mutex_);
    return blocks_;
  }

 private:
  uint64_t find();
  uint64_t take_over();

  Arena& arena_;
  const size_t block_bytes_;
  const size_t kept_blocks_;
  mutable std::mutex mutex_;  // guards what follows, and leases against ending
  size_t blocks_ = 0;
  std::vector<uint64_t> free_;
  std::vector<Lease*> leases_;
  size_t next_ = 0;  // where the search for an idle block goes on
};

}  // namespace procgroup
