// How the ranks of a communicator connect, and how frames get from one to another.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cuda_device.hpp"
#include "nccl_communicator.hpp"

namespace stand_in::nccl {
namespace {

struct Hello {
  int32_t rank;
  int32_t size;
};

struct Address {
  explicit Address(const std::string& id, int rank) {
    const auto name = text(id, "/", rank);  // after a zero byte: in the abstract namespace, so no file remains
    std::copy_n(name.data(), std::min(name.size(), sizeof(address.sun_path) - 1), address.sun_path + 1);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t length;
};

int new_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

bool read_fully(int socket, void* to, size_t bytes) {
  return bytes == 0 || recv(socket, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

// A header and its payload, in one call where they fit. A write to a rank that died is lost, as in NCCL.
void write_fully(int socket, const void* header, size_t header_bytes, const void* payload, size_t payload_bytes) {
  iovec parts[] = {{const_cast<void*>(header), header_bytes}, {const_cast<void*>(payload), payload_bytes}};
  while (parts[0].iov_len + parts[1].iov_len > 0) {
    const msghdr message{.msg_iov = parts, .msg_iovlen = 2};
    const auto count = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (count < 0 && errno != EINTR) return;
    for (size_t rest = count < 0 ? 0 : static_cast<size_t>(count); auto& part : parts) {
      const auto taken = std::min(rest, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      rest -= taken;
    }
  }
}

// What has arrived from one rank, and is no whole frame yet.
class Arrivals {
 public:
  explicit Arrivals(int socket) : socket_(socket) {}

  // Read what is there; false once the rank has ended.
  bool read() {
    constexpr size_t kMost = 1 << 18;
    bytes_.resize(end_ + kMost);
    const auto count = recv(socket_, bytes_.data() + end_, kMost, 0);
    end_ += count > 0 ? static_cast<size_t>(count) : 0;
    return count > 0 || (count < 0 && errno == EINTR);
  }

  std::optional<Frame> take_frame() {
    Frame frame;
    if (end_ - begin_ < sizeof(Header)) return std::nullopt;
    std::memcpy(&frame.header, bytes_.data() + begin_, sizeof(Header));
    if (end_ - begin_ - sizeof(Header) < frame.header.bytes) return std::nullopt;
    const auto* payload = bytes_.data() + begin_ + sizeof(Header);
    frame.payload.assign(payload, payload + frame.header.bytes);
    begin_ += sizeof(Header) + frame.header.bytes;
    return frame;
  }

  // Move the beginning of a frame to the front, after all whole ones were taken.
  void compact() {
    std::copy(bytes_.begin() + begin_, bytes_.begin() + end_, bytes_.begin());
    end_ -= std::exchange(begin_, 0);
  }

 private:
  int socket_;
  Bytes bytes_{};
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace

// Connections

void Communicator::connect() {
  const Address own(id, rank);
  const int listener = new_socket();
  if (bind(listener, own.get(), own.length) != 0 || listen(listener, size) != 0) {
    ::close(listener);
    throw Refused{kInternalError, text("Bootstrap : rank ", rank, " of ", size, " ranks has already checked in")};
  }
  try {
    for (int peer = 0; peer < rank; ++peer) connect_to(peer);
    accept_from_higher_ranks(listener);
  } catch (const Refused&) {
    ::close(listener);
    throw;
  }
  ::close(listener);
  reader_ = std::thread([this] { read_all(); });
  refuse_shared_devices();
}

void Communicator::connect_to(int peer) {
  const Address address(id, peer);
  const int connection = new_socket();
  while (::connect(connection, address.get(), address.length) != 0) usleep(2000);
  const Hello hello{rank, size};
  write_fully(connection, &hello, sizeof(hello), nullptr, 0);
  peers_[peer].socket = connection;
}

void Communicator::accept_from_higher_ranks(int listener) {
  for (int missing = size - 1 - rank; missing > 0;) {
    const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Hello hello{};
    const bool is_complete = read_fully(connection, &hello, sizeof(hello));
    if (is_complete && hello.size == size && hello.rank > rank && hello.rank < size && peers_[hello.rank].socket < 0) {
      peers_[hello.rank].socket = connection;
      --missing;
      continue;
    }
    ::close(connection);
    if (is_complete) {
      throw Refused{kInternalError, text("Bootstrap : mismatch in rank count from procs ", size, " : ", hello.size)};
    }
  }
}

// As in NCCL, a GPU is the host's, whose name NCCL_HOSTID overrides.
void Communicator::refuse_shared_devices() {
  static const std::vector<int> gpus = visible_gpus();
  const char* host = std::getenv("NCCL_HOSTID");
  const auto place = text(host != nullptr ? host : "", "/", gpus.at(device));
  const auto* letters = reinterpret_cast<const std::byte*>(place.data());
  const auto places = gather(Bytes(letters, letters + place.size()));
  if (!places || number_from_environment("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0) return;
  for (int second = 1; second < size; ++second) {
    const auto first = std::find(places->begin(), places->begin() + second, (*places)[second]) - places->begin();
    if (first == second) continue;
    const auto* device_name = reinterpret_cast<const char*>((*places)[second].data());
    throw Refused{kInvalidUsage, text("Duplicate GPU detected : rank ", first, " and rank ", second,
                                      " both on CUDA device ", std::string(device_name, (*places)[second].size()))};
  }
}

// Frames

void Communicator::read_all() {
  std::vector<pollfd> sockets;
  std::vector<Arrivals> arrivals;
  for (auto& peer : peers_) {
    sockets.push_back({peer.socket, POLLIN, 0});  // poll ignores this rank's own, -1
    arrivals.emplace_back(peer.socket);
  }
  while (std::any_of(sockets.begin(), sockets.end(), [](const pollfd& entry) { return entry.fd >= 0; })) {
    ::poll(sockets.data(), sockets.size(), -1);
    for (int peer = 0; peer < size; ++peer) {
      if (sockets[peer].revents == 0) continue;
      if (!arrivals[peer].read()) sockets[peer].fd = -1;  // the rank ended, and who waits for it waits on
      while (auto frame = arrivals[peer].take_frame()) deliver(peer, std::move(*frame));
      arrivals[peer].compact();
    }
  }
}

void Communicator::deliver(int peer, Frame frame) {
  if (frame.header.kind == Kind::kFailure) {
    const std::string reason(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
    return fail(static_cast<Status>(frame.header.root), text("rank ", peer, " reports: ", reason));
  }
  std::lock_guard lock(mutex_);
  if (frame.header.kind == Kind::kAck) {
    ++peers_[peer].acks;
  } else if (frame.header.kind == Kind::kConnect) {
    peers_[peer].is_in_collective = true;
  } else {
    auto& queue = frame.header.kind == Kind::kControl ? peers_[peer].control : peers_[peer].data;
    queue.push_back(std::move(frame));
  }
  changed_.notify_all();
}

void Communicator::write(int peer, Header header, const Bytes& payload) {
  header.bytes = payload.size();
  if (peer == rank) return deliver(peer, {header, payload});
  std::lock_guard lock(peers_[peer].writing);
  write_fully(peers_[peer].socket, &header, sizeof(header), payload.data(), payload.size());
}

void Communicator::announce_collective() {
  if (is_announced_.exchange(true)) return;
  for (int peer = 0; peer < size; ++peer) write(peer, {.kind = Kind::kConnect}, {});
}

bool Communicator::wait_for_collectives() {
  if (is_connected_) return true;
  const auto is_there = [](const Peer& peer) { return peer.is_in_collective; };
  if (!wait([&] { return std::all_of(peers_.begin(), peers_.end(), is_there); })) return false;
  is_connected_ = true;
  return true;
}

std::optional<std::vector<Bytes>> Communicator::gather(const Bytes& own) {
  for (int peer = 0; peer < size; ++peer) write(peer, {.kind = Kind::kControl}, own);
  std::vector<Bytes> all;
  for (auto& peer : peers_) {
    if (!wait([&] { return !peer.control.empty(); })) return std::nullopt;
    std::lock_guard lock(mutex_);
    all.push_back(std::move(peer.control.front().payload));
    peer.control.pop_front();
  }
  return all;
}

}  // namespace stand_in::nccl
