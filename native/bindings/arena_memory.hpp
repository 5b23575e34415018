// Memory in a rank's arena that belongs to arrays of the user: peers on the same host read it in place.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/arena.hpp"

namespace procgroup {

// One allocation. It keeps the arena mapped, also when the engine has ended, and goes with the last array over it.
// A forked child shares it with its parent, as it would a mapped file, or, with `copied_by_fork`, writes into copies of
// its own; the parent alone gives it back.
class ArenaMemory {
 public:
  // Throws std::system_error when the system refuses memory.
  ArenaMemory(std::shared_ptr<Arena> arena, size_t bytes, bool copied_by_fork);
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static void copy_in_forked_child();

  std::shared_ptr<Arena> arena_;
  size_t bytes_;
  uint64_t offset_;
  std::byte* data_;
  bool copied_by_fork_;
  pid_t owner_;
};

}  // namespace procgroup
