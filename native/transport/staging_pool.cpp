#include "transport/staging_pool.hpp"

#include <utility>

namespace procgroup {

StagingPool::Lease::Lease(StagingPool& pool, std::function<bool(uint64_t)> is_done)
    : pool_(pool), is_done_(std::move(is_done)) {
  const std::lock_guard lock(pool_.mutex_);
  pool_.leases_.push_back(this);
}

// The pool takes blocks away under its mutex, so here the state is settled.
void StagingPool::Lease::acquire() {
  const std::lock_guard lock(pool_.mutex_);
  if (state_.load(std::memory_order_relaxed) == State::kNone) offset_ = pool_.find();
  state_.store(State::kInUse, std::memory_order_relaxed);
}

uint64_t StagingPool::Lease::surrender() {
  const std::lock_guard lock(pool_.mutex_);
  std::erase(pool_.leases_, this);
  state_.store(State::kNone, std::memory_order_relaxed);
  return std::exchange(offset_, 0);
}

void StagingPool::give_back(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  if (blocks_ <= kept_blocks_) return free_.push_back(offset);
  arena_.release(offset);
  --blocks_;
}

uint64_t StagingPool::find() {
  if (!free_.empty()) {
    const uint64_t offset = free_.back();
    free_.pop_back();
    return offset;
  }
  if (blocks_ >= kept_blocks_)
    if (const uint64_t offset = take_over(); offset != 0) return offset;
  const uint64_t offset = arena_.allocate(block_bytes_);
  ++blocks_;
  return offset;
}

uint64_t StagingPool::take_over() {
  using State = Lease::State;
  for (size_t looked = 0; looked < leases_.size(); ++looked) {
    next_ = (next_ + 1) % leases_.size();
    Lease& lease = *leases_[next_];
    State idle = State::kIdle;
    if (!lease.state_.compare_exchange_strong(idle, State::kBusy, std::memory_order_acquire)) continue;
    const bool done = lease.is_done_(lease.sequence_);
    const uint64_t offset = lease.offset_;
    if (done) lease.offset_ = 0;
    lease.state_.store(done ? State::kNone : State::kIdle, std::memory_order_release);
    if (done) return offset;
  }
  return 0;
}

}  // namespace procgroup
