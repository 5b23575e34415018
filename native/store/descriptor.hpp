// Sockets of the store that a forked child does not keep.
//
// A child that inherits a connection would hold it open after its parent has died, and hide that
// death. So every descriptor of the store is registered here, and the child closes all of them in its
// pthread_atfork handler. fork_generation() tells an object whether it was made before such a fork.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace procgroup {

// Held across fork(), so that a child never finds what it protects half changed. Hold it briefly; no
// other lock is taken, no StoreDescriptor is made or destroyed, and nothing waits while it is held.
std::mutex& fork_mutex();

// How many forks lie between this process and the one that loaded the library.
uint64_t fork_generation();

class StoreDescriptor {
 public:
  StoreDescriptor() = default;
  explicit StoreDescriptor(int number);
  StoreDescriptor(StoreDescriptor&& other) noexcept
      : number_(std::exchange(other.number_, -1)), generation_(other.generation_) {}
  StoreDescriptor& operator=(StoreDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(generation_, other.generation_);
    return *this;
  }
  ~StoreDescriptor() { reset(); }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void reset();

 private:
  int number_ = -1;
  uint64_t generation_ = 0;
};

}  // namespace procgroup
