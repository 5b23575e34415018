// Reads arrays of other ranks on this host directly from their memory: one copy instead of two.
//
// Two ways to a peer's memory: an array in the peer's arena is mapped here; any other is read by the kernel
// (process_vm_readv), where it allows that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/copy.hpp"
#include "transport/arena.hpp"

namespace procgroup {

// The place of an array, as published by its owner: an address in its process, or an offset in its arena.
class RemotePlace {
 public:
  RemotePlace() = default;
  // The place of this process's own array.
  static RemotePlace of(const void* data, size_t bytes, const Arena& own);

  bool in_arena() const { return (word_ & kInArena) != 0; }
  uint64_t position() const { return word_ & ~kInArena; }

 private:
  static constexpr uint64_t kInArena = uint64_t{1} << 63;
  uint64_t word_ = 0;
};

// Whether the kernel would let a peer read this process's array: not where it is memory of a device.
bool is_readable(const void* data);

// The same with a cache, for repeated calls on few arrays: the kernel's answer takes 0.8 us, as long as reading 4 KiB.
// An answer is kept for 10 ms. If a device maps memory at an array's address in that time, the peers' reads of it fail,
// and they report that.
class ReadableArrays {
 public:
  bool has(const void* data);

 private:
  struct Answer {
    const void* data = nullptr;
    int64_t until_ns = 0;
  };
  static constexpr int64_t kGoodForNs = 10'000'000;

  static constexpr size_t kAnswers = 16;

  std::array<Answer, kAnswers> answers_{};  // where an array's is found depends on its address
};

class PeerMemory {
 public:
  // Finds out how to read the peer; `socket` is the one that it is connected by, or -1 for a thread of this process.
  PeerMemory(const Arena& arena, int socket);

  // Whether any array of the peer can be read, and not only those in its arena.
  bool reads_everything() const { return way_ != Way::kArenaOnly; }
  // Whether the peer's process lives, as far as its life word tells.
  bool is_alive() const { return arena_.header().life.is_held(); }
  // Whether the peer's process has died or is dying; false where it left in order. Where another library has moved so
  // many bytes that it may have read the peer's memory, one byte of that is read, too, in some 2 us: the kernel refuses
  // it some moments before it marks the life word.
  bool has_died(size_t moved_bytes) const;
  // The address of the array here, when it can be reached without a copy; else null.
  const std::byte* mapped(RemotePlace place, size_t offset, size_t bytes) const;
  // Copy from the peer's array; false when it cannot be read. What was copied counts only if the owner still exposes
  // its array afterwards, which the caller finds out: see single_copy.hpp. `copy` does it where the array can be
  // reached.
  bool read(void* to, RemotePlace place, size_t offset, size_t bytes, CopyFunction copy = copy_cached) const;
  // As read(), of what its owner may write meanwhile: a race detector is not to see it.
  bool read_exposed(void* to, RemotePlace place, size_t offset, size_t bytes) const;

 private:
  // An array of a thread of this process is read by the kernel too: its owner may give the call up, and the memory back
  // to the system, while it is read.
  enum class Way : uint8_t { kSameProcess, kKernel, kArenaOnly };

  Way way_to_threads() const;
  bool read_by_kernel(void* to, uint64_t address, size_t bytes) const;
  bool proves_itself(int socket);

  const Arena& arena_;
  Way way_ = Way::kArenaOnly;
  int pid_ = 0;  // as this process sees it
};

}  // namespace procgroup
