#include "transport/peer_memory.hpp"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "base/clock.hpp"

namespace procgroup {
namespace {

// MPI libraries copy what is smaller through shared memory, which outlives its writer.
constexpr size_t kReadBytes = 4096;

// One transfer by the kernel; the number of bytes copied, or -1.
ssize_t kernel_read(int pid, void* to, uint64_t address, size_t bytes) {
  const iovec here{to, bytes};
  const iovec there{reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes};
  return process_vm_readv(pid, &here, 1, &there, 1, 0);
}

}  // namespace

RemotePlace RemotePlace::of(const void* data, size_t bytes, const Arena& own) {
  RemotePlace place;
  const std::optional<uint64_t> offset = own.offset_of(data, bytes);
  place.word_ = offset ? *offset | kInArena : reinterpret_cast<uintptr_t>(data);
  return place;
}

bool is_readable(const void* data) {
  char byte;
  return kernel_read(getpid(), &byte, reinterpret_cast<uintptr_t>(data), 1) == 1;
}

bool ReadableArrays::has(const void* data) {
  // Multiplied by 2^64 over the golden ratio, addresses at any regular distance fall into different places.
  static_assert(kAnswers == 16);
  Answer& answer = answers_[reinterpret_cast<uintptr_t>(data) * 0x9e3779b97f4a7c15 >> 60];
  const int64_t now = now_ns();
  if (answer.data == data && now < answer.until_ns) return true;
  if (!is_readable(data)) return false;
  answer = {.data = data, .until_ns = now + kGoodForNs};
  return true;
}

PeerMemory::PeerMemory(const Arena& arena, int socket) : arena_(arena) {
  if (socket < 0)
    way_ = way_to_threads(), pid_ = getpid();
  else if (proves_itself(socket))
    way_ = Way::kKernel;
}

PeerMemory::Way PeerMemory::way_to_threads() const {
#if defined(__SANITIZE_THREAD__)  // which does not see what the kernel reads
  return Way::kSameProcess;
#else
  return is_readable(this) ? Way::kKernel : Way::kArenaOnly;
#endif
}

// The process at the socket's other end is the arena's owner when it has the arena's nonce in its own memory. Its id
// comes from the socket, as this process's pid namespace sees it: the id in the arena may mean another process here.
bool PeerMemory::proves_itself(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.pid <= 0) return false;
  pid_ = peer.pid;
  uint64_t nonce = 0;
  return read_by_kernel(&nonce, arena_.header().nonce_address, sizeof nonce) && nonce == arena_.header().nonce;
}

const std::byte* PeerMemory::mapped(RemotePlace place, size_t offset, size_t bytes) const {
  if (place.in_arena()) return arena_.at(place.position() + offset, bytes);
  if (way_ != Way::kSameProcess) return nullptr;
  return reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(place.position())) + offset;
}

bool PeerMemory::read(void* to, RemotePlace place, size_t offset, size_t bytes, CopyFunction copy) const {
  if (const std::byte* from = mapped(place, offset, bytes)) {
    copy(to, from, bytes);
    return true;
  }
  return way_ == Way::kKernel && read_by_kernel(to, place.position() + offset, bytes);
}

bool PeerMemory::read_exposed(void* to, RemotePlace place, size_t offset, size_t bytes) const {
  if (place.in_arena()) return read(to, place, offset, bytes);
  return way_ != Way::kArenaOnly && read_by_kernel(to, place.position() + offset, bytes);
}

bool PeerMemory::has_died(size_t moved_bytes) const {
  const LifeWord& life = arena_.header().life;
  if (life.is_lost()) return true;
  char byte;
  if (moved_bytes < kReadBytes || way_ != Way::kKernel ||
      kernel_read(pid_, &byte, arena_.header().nonce_address, 1) == 1)
    return false;
  return errno == ESRCH && !life.is_left();
}

// A process that ended may have left its id to another one: the bytes count only if it lives after they were read.
bool PeerMemory::read_by_kernel(void* to, uint64_t address, size_t bytes) const {
  auto* next = static_cast<std::byte*>(to);
  while (bytes != 0) {
    const ssize_t copied = kernel_read(pid_, next, address, bytes);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) return false;
    next += copied;
    address += static_cast<size_t>(copied);
    bytes -= static_cast<size_t>(copied);
  }
  return arena_.header().life.is_held();
}

}  // namespace procgroup
