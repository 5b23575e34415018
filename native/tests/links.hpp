// Links between ranks that are threads of one process: pairs of channels of each kind.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "messages/messages.hpp"
#include "tests/check.hpp"
#include "transport/channel.hpp"

namespace procgroup::testing {

enum class LinkKind { kUnixSocket, kTcp, kRing };
inline constexpr LinkKind kLinkKinds[] = {LinkKind::kUnixSocket, LinkKind::kTcp, LinkKind::kRing};

inline const char* link_name(LinkKind kind) {
  return kind == LinkKind::kUnixSocket ? "Unix sockets" : kind == LinkKind::kTcp ? "TCP" : "rings";
}

using ChannelPair = std::pair<std::unique_ptr<Channel>, std::unique_ptr<Channel>>;

inline std::pair<FileDescriptor, FileDescriptor> unix_sockets() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

inline std::pair<FileDescriptor, FileDescriptor> tcp_sockets() {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  CHECK(listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  FileDescriptor first(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(connect(first.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  FileDescriptor second(accept(listener.get(), nullptr, nullptr));
  CHECK(first && second);
  return {std::move(first), std::move(second)};
}

// Counts announcements; a rank that found nothing to do sleeps until the count changes.
struct Doorbell {
  std::atomic<uint32_t> rings{0};
  void ring() {
    rings.fetch_add(1, std::memory_order_release);
    rings.notify_all();
  }
};

// Links, and the memory of the rings among them; it outlives the channels.
class Links {
 public:
  explicit Links(int ranks, size_t ring_capacity = 64 * 1024)
      : doorbells_(static_cast<size_t>(ranks)), ring_capacity_(ring_capacity) {}

  ChannelPair connect(LinkKind kind, int first, int second) {
    if (kind == LinkKind::kRing) return connect_rings(first, second);
    auto ends = kind == LinkKind::kTcp ? tcp_sockets() : unix_sockets();
    return {std::make_unique<TcpChannel>(std::move(ends.first)), std::make_unique<TcpChannel>(std::move(ends.second))};
  }
  Doorbell& doorbell(int rank) { return doorbells_[static_cast<size_t>(rank)]; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  Ring* make_ring() {
    memory_.emplace_back(std::aligned_alloc(Ring::kLine, Ring::bytes(ring_capacity_)));
    return Ring::initialise(memory_.back().get());
  }
  ChannelPair connect_rings(int first, int second) {
    Ring* there = make_ring();
    Ring* back = make_ring();
    return {std::make_unique<RingChannel>(there, back, ring_capacity_, [this, second] { doorbell(second).ring(); }),
            std::make_unique<RingChannel>(back, there, ring_capacity_, [this, first] { doorbell(first).ring(); })};
  }

  std::vector<Doorbell> doorbells_;
  size_t ring_capacity_;
  std::vector<std::unique_ptr<void, Free>> memory_;
};

// Pump until the condition holds, sleeping while nothing moves.
inline void pump_until(Messages& messages, Doorbell& doorbell, const std::function<bool()>& holds) {
  while (true) {
    const uint32_t seen = doorbell.rings.load(std::memory_order_acquire);
    const bool moved = messages.pump();
    if (holds()) return;
    if (moved) continue;
    std::vector<pollfd> descriptors;
    messages.descriptors(descriptors);
    if (descriptors.empty()) {
      doorbell.rings.wait(seen, std::memory_order_acquire);
    } else {
      CHECK(poll(descriptors.data(), descriptors.size(), 10'000) > 0);
    }
  }
}

// Run one function per rank, each in its own thread with its own Messages, all linked with each other.
inline void run_ranks(int ranks, LinkKind kind, size_t ring_capacity,
                      const std::function<void(int rank, Messages&, Doorbell&)>& body) {
  Links links(ranks, ring_capacity);
  std::vector<std::unique_ptr<Messages>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<Messages>(rank, ranks));
  for (int first = 0; first < ranks; ++first) {
    for (int second = first + 1; second < ranks; ++second) {
      ChannelPair ends = links.connect(kind, first, second);
      all[static_cast<size_t>(first)]->attach(second, std::move(ends.first));
      all[static_cast<size_t>(second)]->attach(first, std::move(ends.second));
    }
  }
  std::atomic<int> finished{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      CASE("rank %d of %d, over %s", rank, ranks, link_name(kind));
      Messages& messages = *all[static_cast<size_t>(rank)];
      body(rank, messages, links.doorbell(rank));
      ++finished;
      while (finished < ranks) {  // others may still need what we have to send, or room for what they send
        if (!messages.pump()) poll(nullptr, 0, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace procgroup::testing
