#include "transport/arena.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/futex.hpp"

namespace procgroup {
namespace {

constexpr uint64_t kMagic = 0x3150554f52474350;  // "PCGROUP1"
constexpr uint32_t kVersion = 8;
// Address space, not memory: pages exist once allocate() has reserved them.
constexpr uint64_t kReach = uint64_t{8} << 30;

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// A private arena has less where a limit leaves less address space: a quarter of what there is, at least this much.
constexpr uint64_t kSmallestReach = uint64_t{4} << 20;

std::byte* map(int descriptor, uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) refuse("mapping an arena");
  // A forked child must not write into memory that its parent shares with other ranks.
  madvise(base, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(base);
}

// Back a range with memory. A signal may interrupt that, however many times.
void reserve_shared(int descriptor, uint64_t offset, uint64_t bytes) {
  int result;
  do {
    result = fallocate(descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) refuse("reserving shared memory");
}

FileDescriptor make_bell() {
  FileDescriptor bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell) refuse("creating an eventfd");
  return bell;
}

}  // namespace

Arena::Arena(FileDescriptor descriptor, FileDescriptor bell, std::byte* base, uint64_t reach)
    : descriptor_(std::move(descriptor)), bell_(std::move(bell)), base_(base), reach_(reach) {}

Arena::Arena(Arena&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      bell_(std::move(other.bell_)),
      base_(std::exchange(other.base_, nullptr)),
      reach_(other.reach_),
      is_private_(other.is_private_),
      used_(std::move(other.used_)),
      free_(std::move(other.free_)) {}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, reach_);
}

Arena Arena::create(int rank) {
  FileDescriptor descriptor(memfd_create("procgroup", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor) refuse("creating an arena");
  if (ftruncate(descriptor.get(), kReach) != 0) refuse("sizing an arena");
  if (fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) refuse("sealing an arena");
  FileDescriptor bell = make_bell();
  reserve_shared(descriptor.get(), 0, kArenaPage);
  std::byte* base = map(descriptor.get(), kReach);
  return begin(rank, std::move(descriptor), std::move(bell), base, kReach);
}

Arena Arena::create_private(int rank) {
  FileDescriptor bell = make_bell();
  const auto map_private = [](uint64_t reach) {
    return mmap(nullptr, reach, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  uint64_t reach = kReach;
  void* base = map_private(reach);
  if (base == MAP_FAILED) {
    for (; base == MAP_FAILED && reach > kSmallestReach; base = map_private(reach)) reach /= 2;
    if (base != MAP_FAILED) munmap(base, reach);
    reach = std::max(reach / 4, kSmallestReach);
    base = map_private(reach);
  }
  if (base == MAP_FAILED) refuse("mapping memory");
  madvise(base, reach, MADV_DONTFORK);
  Arena arena = begin(rank, {}, std::move(bell), static_cast<std::byte*>(base), reach);
  arena.is_private_ = true;
  return arena;
}

Arena Arena::begin(int rank, FileDescriptor descriptor, FileDescriptor bell, std::byte* base, uint64_t reach) {
  auto* header = new (base) ArenaHeader{};
  header->magic = kMagic;
  header->version = kVersion;
  header->rank = rank;
  header->pid = getpid();
  header->reach = reach;
  Arena arena(std::move(descriptor), std::move(bell), base, reach);
  arena.free_[kArenaPage] = reach - kArenaPage;
  return arena;
}

Arena Arena::attach(FileDescriptor descriptor, FileDescriptor bell) {
  struct stat status{};
  if (fstat(descriptor.get(), &status) != 0) refuse("examining a peer's arena");
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (static_cast<uint64_t>(status.st_size) != kReach || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::runtime_error("a peer sent a descriptor that is not an arena");
  // Mapped first: a compiler may evaluate arguments in any order, and clang moves the descriptor away before it is
  // read.
  std::byte* base = map(descriptor.get(), kReach);
  Arena arena(std::move(descriptor), std::move(bell), base, kReach);
  const ArenaHeader& header = arena.header();
  if (header.magic != kMagic || header.version != kVersion)
    throw std::runtime_error("a peer's arena has another version; run one version of procgroup on all ranks");
  arena.descriptor_.reset();
  return arena;
}

void Arena::reserve(uint64_t offset, uint64_t bytes) const {
  if (!is_private_) reserve_shared(descriptor_.get(), offset, bytes);
}

uint64_t Arena::allocate(size_t bytes) {
  const uint64_t wanted = round_up(bytes == 0 ? 1 : bytes, kArenaPage);
  const std::lock_guard lock(mutex_);
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    const auto [offset, room] = *hole;
    if (room < wanted) continue;
    reserve(offset, wanted);
    free_.erase(hole);
    if (room > wanted) free_[offset + wanted] = room - wanted;
    used_[offset] = wanted;
    return offset;
  }
  errno = ENOMEM;
  refuse("allocating shared memory");
}

void Arena::release(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(offset);
  if (found == used_.end()) return;
  uint64_t start = found->first;
  uint64_t bytes = found->second;
  used_.erase(found);
  // The pages go back to the system and read as zero when they are reserved again.
  if (is_private_)
    madvise(base_ + start, bytes, MADV_DONTNEED);
  else
    fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
              static_cast<off_t>(bytes));
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      bytes += previous->second;
    }
  }
  free_[start] = bytes;
}

std::byte* Arena::at(uint64_t offset, size_t bytes) const {
  if (offset >= reach_ || bytes > reach_ - offset)
    throw std::out_of_range("a peer named shared memory outside its arena");
  return base_ + offset;
}

std::byte* Arena::at_line(uint64_t offset, size_t bytes) const {
  if (offset % kArenaLine != 0) throw std::out_of_range("a peer named shared memory in the middle of a line");
  return at(offset, bytes);
}

std::optional<uint64_t> Arena::offset_of(const void* data, size_t bytes) const {
  // As integers: pointers into different objects are not ordered.
  const uint64_t offset = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(base_);
  if (offset >= reach_ || bytes > reach_ - offset) return std::nullopt;
  return offset;
}

void Arena::wake() const {
  ArenaHeader& target = header();
  target.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (target.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(target.doorbell);
  if (target.socket_sleepers.load(std::memory_order_seq_cst) == 0) return;
  const uint64_t one = 1;
  // A full counter means that a wake is already pending.
  static_cast<void>(!write(bell_.get(), &one, sizeof one));
}

void Arena::abandon() { base_ = nullptr; }

}  // namespace procgroup
