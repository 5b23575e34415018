// Owns one file descriptor and closes it. A forked child closes all of them.
//
// A child that inherits a connection would hold it open after its parent has died, and hide that
// death. So every descriptor is registered here, and the child closes them in its pthread_atfork handler.
// fork_generation() tells an object whether it was made before such a fork.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace procgroup {

// Held across fork(), so that a child never finds what it protects half changed. Hold it briefly; no
// other lock is taken, no FileDescriptor is made or destroyed, and nothing waits while it is held.
std::mutex& fork_mutex();

// The number of forks between the process that loaded the library and this one.
uint64_t fork_generation();

// Have `use` called in every forked child before it closes the descriptors, with fork_mutex() held.
void use_in_forked_child(void (*use)());

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number);
  FileDescriptor(FileDescriptor&& other) noexcept
      : number_(std::exchange(other.number_, -1)), generation_(other.generation_) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(generation_, other.generation_);
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return number_; }
  // Whether there is one that is open: false also in a forked child, for those that its parent made.
  explicit operator bool() const { return number_ >= 0 && generation_ == fork_generation(); }
  void reset();

 private:
  int number_ = -1;
  uint64_t generation_ = 0;
};

}  // namespace procgroup
