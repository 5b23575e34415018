// What the operations of a batch do, and how a communicator fails and ends.
#include "nccl_communicator.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "cuda_device.hpp"

std::shared_ptr<stand_in::Allocation> stand_in_find_memory(const void* address);

namespace stand_in::nccl {
namespace {

// Thrown where an abort ends what a batch waits for.
struct Ended {};

std::string describe(const Header& header) {
  auto words = text(name_of(header.kind), " of ", header.count, " x ", name_of_type(header.type));
  const auto kind = header.kind;
  if (is_reduction(kind)) words += text(", ", name_of_reduction(header.reduction));
  const bool has_root = kind == Kind::kBroadcast || kind == Kind::kReduce;
  return has_root ? text(words, ", root ", header.root) : words;
}

bool agree(const Header& own, const Header& other) {
  if (own.kind == Kind::kRecv) return other.kind == Kind::kSend && own.count == other.count && own.type == other.type;
  return own.kind == other.kind && own.count == other.count && own.type == other.type &&
         own.reduction == other.reduction && own.root == other.root;
}

// Memory of an operation while it runs.
struct Memory {
  std::shared_ptr<Allocation> allocation;
  std::byte* bytes;
};

Memory memory_at(const void* address, size_t offset, size_t bytes) {
  auto allocation = stand_in_find_memory(address);
  const auto where = reinterpret_cast<uintptr_t>(address) + offset;
  if (allocation == nullptr || !allocation->contains(where, bytes)) {
    throw Refused{kUnhandledCudaError, text("illegal address ", address, ": freed before the stream came to it")};
  }
  return {allocation, allocation->at(where)};
}

Bytes copy_of(const void* address, size_t offset, size_t bytes) {
  if (bytes == 0) return {};
  const auto memory = memory_at(address, offset, bytes);
  return Bytes(memory.bytes, memory.bytes + bytes);
}

void copy_into(void* address, size_t offset, const Bytes& bytes) {
  if (bytes.empty()) return;
  std::copy(bytes.begin(), bytes.end(), memory_at(address, offset, bytes.size()).bytes);
}

// The batches of all communicators of this process that have begun and not left yet.
class Kernels {
 public:
  // Never destroyed: streams run while the process ends.
  static Kernels& get() {
    static Kernels* kernels = new Kernels;
    return *kernels;
  }

  uint64_t begin(int device) {
    std::lock_guard lock(mutex_);
    devices_.emplace(++last_, device);
    return last_;
  }

  void end(uint64_t number) {
    std::lock_guard lock(mutex_);
    devices_.erase(number);
    changed_.notify_all();
  }

  // Wait for those that run now.
  void wait_for_device(int device) {
    std::unique_lock lock(mutex_);
    const auto is_earlier = [device, last = last_](auto& entry) {
      return entry.first <= last && entry.second == device;
    };
    changed_.wait(lock, [&] { return std::none_of(devices_.begin(), devices_.end(), is_earlier); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, int> devices_;
  uint64_t last_ = 0;
};

// A real kernel looks at the abort flag only after many looks at its data, and has begun to write by then.
void spoil(const Operation& operation, size_t bytes) {
  try {
    if (operation.receive != nullptr && bytes > 0) copy_into(operation.receive, 0, Bytes(bytes, std::byte{0xEE}));
  } catch (const Refused&) {  // the memory was freed
  }
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send", "Recv"};
  return kNames[static_cast<int>(kind)];
}

bool sends(const Header& header, int from, int to) {
  if (header.kind == Kind::kReduce) return to == header.root;
  return header.kind != Kind::kBroadcast || from == header.root;
}

bool receives(const Header& header, int rank) {
  return header.kind != Kind::kSend && (header.kind != Kind::kReduce || rank == header.root);
}

bool is_reduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

// Batches

void Communicator::add_window(uintptr_t address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  windows_[address] = bytes;
}

bool Communicator::is_in_window(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard lock(mutex_);
  const auto after = windows_.upper_bound(address);
  return after != windows_.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

uint64_t Communicator::issue() {
  std::lock_guard lock(mutex_);
  if (is_aborted_) throw Refused{kInternalError, "the communicator was aborted"};
  return issued_++;
}

void Communicator::withdraw() {
  std::lock_guard lock(mutex_);
  --issued_;
  changed_.notify_all();
}

void Communicator::run(uint64_t number, const std::vector<Operation>& batch) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ == number || is_aborted_; });
    ++running_;
  }
  if (is_aborted_) {
    leave_unbegun(batch);
  } else {
    const auto kernel = Kernels::get().begin(device);
    perform_or_fail(batch);
    Kernels::get().end(kernel);
  }
  std::lock_guard lock(mutex_);
  --running_;
  ++completed_;
  changed_.notify_all();
}

void Communicator::leave_unbegun(const std::vector<Operation>& batch) {
  static const bool is_late = number_from_environment("PROCGROUP_STAND_IN_NCCL_LATE_ABORT", 0) != 0;
  if (!is_late) return;
  for (const auto& operation : batch) {
    const auto& header = operation.header;
    if (!receives(header, rank)) continue;
    const size_t blocks = header.kind == Kind::kAllGather ? size : 1;
    spoil(operation, std::min<size_t>(64, header.count * size_of(header.type) * blocks));
  }
}

void Communicator::perform_or_fail(const std::vector<Operation>& batch) {
  try {
    perform(batch);
  } catch (const Refused& refused) {
    fail(refused.status, refused.reason);
    const auto* letters = reinterpret_cast<const std::byte*>(refused.reason.data());
    const Header header{.kind = Kind::kFailure, .root = refused.status};
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) write(peer, header, Bytes(letters, letters + refused.reason.size()));
    }
    hang();
  } catch (const Ended&) {
  }
}

void Communicator::perform(const std::vector<Operation>& batch) {
  for (const auto& operation : batch) {
    if (!operation.failure) continue;
    if (*operation.failure != kInProgress)
      fail(*operation.failure, text(name_of(operation.header.kind), " failed on request"));
    return hang();
  }
  for (const auto& operation : batch) {
    if (operation.header.kind < Kind::kSend) collective(operation);
  }
  messages(batch);
}

void Communicator::collective(const Operation& operation) {
  const auto& header = operation.header;
  for (int peer = 0; peer < size; ++peer) {
    write(peer, header, sends(header, rank, peer) ? contribution(operation, peer) : Bytes{});
    if (header.count == 0) ++peers_[peer].empty_announced;
  }
  if (header.count == 0) return;  // NCCL drops it: no rank waits for another
  std::vector<Bytes> contributions;
  for (int peer = 0; peer < size; ++peer) contributions.push_back(matching(operation, peer));
  if (header.kind == Kind::kAllGather) {
    for (int peer = 0; peer < size; ++peer) {
      copy_into(operation.receive, contributions[0].size() * peer, contributions[peer]);
    }
  } else if (header.kind == Kind::kBroadcast) {
    copy_into(operation.receive, 0, contributions[header.root]);
  } else if (sends(header, rank, rank)) {
    const auto memory = memory_at(operation.receive, 0, contributions[0].size());
    reduce(header.type, header.reduction, contributions, memory.bytes);
  }
}

Bytes Communicator::contribution(const Operation& operation, int peer) {
  const auto bytes = operation.header.count * size_of(operation.header.type);
  auto values = copy_of(operation.send, operation.header.kind == Kind::kReduceScatter ? bytes * peer : 0, bytes);
  if (operation.header.reduction == kPreMulSum) scale(operation.header.type, operation.factor, values);
  return values;
}

// Return what a rank has for this operation, and refuse it if the rank is in another operation.
Bytes Communicator::matching(const Operation& operation, int peer) {
  auto& queue = peers_[peer].data;
  while (true) {
    if (!wait([&] { return !queue.empty(); })) throw Ended{};
    std::unique_lock lock(mutex_);
    auto frame = std::move(queue.front());
    queue.pop_front();
    const bool is_empty = frame.header.count == 0 && frame.header.kind < Kind::kSend;
    if (is_empty && peers_[peer].empty_announced > 0) {
      --peers_[peer].empty_announced;
      continue;
    }
    if (agree(operation.header, frame.header)) return std::move(frame.payload);
    throw Refused{kInvalidUsage, text("Mismatch : rank ", rank, " is in ", describe(operation.header), ", rank ", peer,
                                      " is in ", describe(frame.header))};
  }
}

// As in NCCL, a send ends when the receiver has it, and those of one group go on at the same time.
void Communicator::messages(const std::vector<Operation>& batch) {
  for (const auto& operation : batch) {
    const auto bytes = operation.header.count * size_of(operation.header.type);
    if (operation.header.kind == Kind::kSend) {
      write(operation.header.root, operation.header, copy_of(operation.send, 0, bytes));
    }
  }
  for (const auto& operation : batch) {
    if (operation.header.kind != Kind::kRecv) continue;
    copy_into(operation.receive, 0, matching(operation, operation.header.root));
    write(operation.header.root, {.kind = Kind::kAck}, {});
  }
  for (const auto& operation : batch) {
    if (operation.header.kind != Kind::kSend) continue;
    auto& acks = peers_[operation.header.root].acks;
    if (!wait([&] { return acks > 0; })) throw Ended{};
    std::lock_guard lock(mutex_);
    --acks;
  }
}

// State

bool Communicator::wait(const std::function<bool()>& is_met) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_aborted_ || is_met(); });
  return !is_aborted_;
}

void Communicator::hang() {
  wait([] { return false; });
}

bool Communicator::flush() {
  return wait([this] { return completed_ == issued_; });
}

Status Communicator::state() {
  std::lock_guard lock(mutex_);
  return state_;
}

void Communicator::fail(Status status, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (state_ != kSuccess) return;
  state_ = status;
  set_last_error(reason);
}

// Nothing waits for a stream here: that is for wait_for_device().
void Communicator::abort() {
  std::lock_guard lock(mutex_);
  is_aborted_ = true;
  changed_.notify_all();
  for (auto& peer : peers_) shutdown(peer.socket, SHUT_RDWR);
}

void Communicator::wait_for_device() {
  Kernels::get().wait_for_device(device);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return completed_ == issued_ && graphs_ == 0; });
  }
  end_reader();
}

void Communicator::wait_for_kernels() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0; });
}

std::shared_ptr<void> Communicator::keep_for_graph() {
  std::lock_guard lock(mutex_);
  ++graphs_;
  return {nullptr, [this](void*) {
            std::lock_guard lock(mutex_);
            --graphs_;
            changed_.notify_all();
          }};
}

void Communicator::wait_for_graphs() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return graphs_ == 0; });
}

void Communicator::end_reader() {
  std::lock_guard lock(joining_);
  if (reader_.joinable()) reader_.join();
}

void Communicator::close() {
  abort();
  end_reader();
  for (auto& peer : peers_) {
    if (peer.socket >= 0) ::close(peer.socket);
  }
}

}  // namespace stand_in::nccl
