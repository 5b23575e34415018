// An arena: the memory that one rank shares with the others on its host.
//
//     arena of rank r (a memfd; reserved before use, so that touching it cannot raise SIGBUS)
//     +--------+------------+-----------------+-----------------+-- - - -
//     | header | allocation | allocation      | ...             | not yet reserved
//     +--------+------------+-----------------+-----------------+-- - - -
//
// The owner allocates; peers map the same descriptor and reach an allocation by its offset, which the
// owner publishes. The descriptor is sealed against shrinking, so no peer can be made to fault either.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "base/file_descriptor.hpp"
#include "liveness/life.hpp"

namespace procgroup {

inline constexpr uint64_t kArenaPage = 4096;
inline constexpr uint64_t kArenaLine = 64;

constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// First in every arena. Peers write `doorbell`, to wake, and in group memory that they have left: all else is its
// owner's.
struct ArenaHeader {
  uint64_t magic;
  uint32_t version;
  int32_t rank;
  int64_t pid;
  uint64_t reach;            // bytes of address space; offsets at or above it are never valid
  uint64_t rings;            // offset of this rank's outgoing rings, one per world rank
  uint64_t ring_capacity;    // of each ring
  uint64_t wait_edge_board;  // offset of what this rank shows of a call in which it is stuck
  uint64_t exposure_tables;  // offset of this rank's exposure tables, one per world rank
  uint64_t nonce;            // a random number that the owner also has at this address: see PeerMemory
  uint64_t nonce_address;
  alignas(64) LifeWord life;
  // Offset of the failure record (head, then details) of a process that ends before its time, by an exception of its
  // program; release-stored, once. 0: none.
  alignas(64) std::atomic<uint64_t> exit_record;
  // The one futex of this process's waiters: whoever changes something that a sleeper may wait for adds
  // one and wakes. `sleepers` tells whether that is worth a system call; those that sleep on sockets, too, are woken by
  // the arena's eventfd.
  alignas(64) std::atomic<uint32_t> doorbell;
  alignas(64) std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> socket_sleepers;
};

class Arena {
 public:
  // Make this rank's arena. Throws std::system_error when memory or descriptors are refused.
  static Arena create(int rank);
  // The same for a rank that shares no memory with others: ordinary memory of this process, with less address
  // space where the system limits it.
  static Arena create_private(int rank);
  // Map a peer's arena; `bell` is its eventfd. Throws std::system_error, or std::runtime_error when it is not one of
  // ours.
  static Arena attach(FileDescriptor descriptor, FileDescriptor bell);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;
  ~Arena();

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  int descriptor() const { return descriptor_.get(); }
  bool is_private() const { return is_private_; }
  // An eventfd that wakes those of the owner's process who sleep on sockets.
  int bell() const { return bell_.get(); }

  // Offset of `bytes` zeroed bytes, aligned to a page, reserved in memory. Throws std::system_error (ENOSPC, ENOMEM).
  uint64_t allocate(size_t bytes);
  void release(uint64_t offset);

  // The address of a range; throws std::out_of_range when a peer named one that is not in the arena.
  std::byte* at(uint64_t offset, size_t bytes) const;
  // The same for structures, which begin at a multiple of kArenaLine; throws also when it does not.
  std::byte* at_line(uint64_t offset, size_t bytes) const;

  // The offset in the arena of these bytes of this process; nothing when they are not, or not wholly, in it.
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const;

  // Wake whoever sleeps in this arena's process.
  void wake() const;

  // In a forked child the mapping is gone (MADV_DONTFORK): forget it without touching it.
  void abandon();

 private:
  Arena(FileDescriptor descriptor, FileDescriptor bell, std::byte* base, uint64_t reach);
  static Arena begin(int rank, FileDescriptor descriptor, FileDescriptor bell, std::byte* base, uint64_t reach);
  void reserve(uint64_t offset, uint64_t bytes) const;

  FileDescriptor descriptor_;
  FileDescriptor bell_;
  std::byte* base_;
  uint64_t reach_;
  bool is_private_ = false;
  std::mutex mutex_;                   // guards the two maps
  std::map<uint64_t, uint64_t> used_;  // offset -> bytes
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, never adjacent
};

}  // namespace procgroup
