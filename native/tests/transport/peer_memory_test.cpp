// Reading another process's arrays, and what becomes of a read when their owner gives up or dies.
#include "transport/peer_memory.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstring>
#include <numeric>

#include "collectives/collective_call.hpp"
#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

// A process with an arena and an array in its own memory, at the end of a Unix socket.
class Owner {
 public:
  static constexpr size_t kCount = 100'000;

  Owner() {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t bytes = sizeof(sa_family_t);
    check(bind(listener, reinterpret_cast<sockaddr*>(&address), bytes) == 0 && listen(listener, 1) == 0, "listen", 0);
    bytes = sizeof address;
    check(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes) == 0, "the socket's name", 0);
    pid_ = fork();
    if (pid_ == 0) live(reinterpret_cast<sockaddr*>(&address), bytes);
    socket_ = accept(listener, nullptr, nullptr);
    close(listener);
    receive();
  }
  Owner(const Owner&) = delete;
  ~Owner() {
    end();
    close(socket_);
  }

  void end() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  int socket_descriptor() const { return socket_; }
  const Arena& arena() const { return *arena_; }
  RemotePlace ordinary{}, in_arena{};

 private:
  struct Places {
    RemotePlace ordinary, in_arena;
  };

  [[noreturn]] static void live(const sockaddr* address, socklen_t bytes) {
    alarm(60);
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection, address, bytes) != 0) _exit(1);
    Arena arena = Arena::create(0);
    LifeLock life(arena.header().life);
    const uint64_t nonce = 0x1234567890abcdef;
    arena.header().nonce = nonce;
    arena.header().nonce_address = reinterpret_cast<uintptr_t>(&nonce);
    std::vector<int64_t> array(kCount);
    std::iota(array.begin(), array.end(), int64_t{1});
    const size_t size = kCount * sizeof(int64_t);
    std::byte* shared = arena.at(arena.allocate(size), size);
    std::memcpy(shared, array.data(), size);
    send(connection, {RemotePlace::of(array.data(), size, arena), RemotePlace::of(shared, size, arena)},
         arena.descriptor());
    for (;;) pause();
  }
  static void send(int connection, Places places, int descriptor) {
    iovec data{&places, sizeof places};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    if (sendmsg(connection, &message, 0) < 0) _exit(1);
  }
  void receive() {
    Places places;
    iovec data{&places, sizeof places};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    check(recvmsg(socket_, &message, 0) == sizeof places, "places", 0);
    int descriptor;
    std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    arena_ = std::make_unique<Arena>(Arena::attach(FileDescriptor(descriptor), FileDescriptor()));
    ordinary = places.ordinary, in_arena = places.in_arena;
  }

  pid_t pid_ = 0;
  int socket_ = -1;
  std::unique_ptr<Arena> arena_;
};

bool is_expected(const std::vector<int64_t>& data, size_t first) {
  for (size_t index = 0; index < data.size(); ++index)
    if (data[index] != static_cast<int64_t>(first + index + 1)) return false;
  return true;
}

void another_process() {
  Owner owner;
  const PeerMemory memory(owner.arena(), owner.socket_descriptor());
  std::vector<int64_t> data(Owner::kCount - 10);
  const size_t bytes = data.size() * sizeof(int64_t);
  check(owner.in_arena.in_arena() && memory.mapped(owner.in_arena, 80, bytes) != nullptr, "mapped", 0);
  check(memory.read(data.data(), owner.in_arena, 80, bytes) && is_expected(data, 10), "an array in the arena", 0);
  check(!owner.ordinary.in_arena() && memory.mapped(owner.ordinary, 0, bytes) == nullptr, "not mapped", 0);
  if (!memory.reads_everything()) {
    std::puts("peer_memory_test: the kernel forbids to read other processes");
    return;
  }
  data.assign(data.size(), 0);
  check(memory.read(data.data(), owner.ordinary, 80, bytes) && is_expected(data, 10), "an ordinary array", 0);
  RemotePlace nowhere = RemotePlace::of(reinterpret_cast<const void*>(8), 8, owner.arena());
  check(!memory.read(data.data(), nowhere, 0, 8) && memory.is_alive(), "an address that is not mapped", 0);
  check(!memory.has_died(4096), "a process that lives", 0);
  owner.end();
  check(!memory.read(data.data(), owner.ordinary, 0, bytes) && !memory.is_alive() && memory.has_died(4096),
        "a process that ended", 0);
}

// As when the process has ended and another one has its id: there are bytes at the address, and the life word alone
// tells that they may not be the owner's.
void bytes_that_are_read_when_the_owner_has_ended_do_not_count() {
  Owner owner;
  const PeerMemory memory(owner.arena(), owner.socket_descriptor());
  if (!memory.reads_everything()) return;
  int64_t one = 0;
  check(memory.read(&one, owner.ordinary, 0, sizeof one) && one == 1, "expected to read it", 0);
  for (const uint32_t ended : {uint32_t{FUTEX_OWNER_DIED}, uint32_t{0}}) {
    CASE("the life word is %#x", ended);
    owner.arena().header().life.word.store(ended);
    one = 0;
    const bool counts = memory.read(&one, owner.ordinary, 0, sizeof one);
    check(one == 1, "expected the kernel to have read it", 0);
    check(!counts, "what was read of an ended process counts", 0);
  }
}

// Who is at the other end of the socket must have the arena's nonce: else only the arena is read.
void another_nonce_is_not_believed() {
  Owner owner;
  owner.arena().header().nonce += 1;
  const PeerMemory memory(owner.arena(), owner.socket_descriptor());
  check(!memory.reads_everything(), "a nonce that is not the process's", 0);
  int64_t one = 0;
  check(memory.read(&one, owner.in_arena, 0, sizeof one) && one == 1, "an array in the arena", 0);
}

void memory_that_cannot_be_read_is_not_exposed() {
  void* forbidden = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(!is_readable(forbidden), "memory without access", 0);
  munmap(forbidden, 4096);
}

// A rank that is a thread may give its call up, and its array back to the system, while another reads it.
void what_a_thread_gave_back_cannot_be_read() {
#if !defined(__SANITIZE_THREAD__)  // there threads read directly, for the race detector
  Arena arena = Arena::create(0);
  const LifeLock life(arena.header().life);
  void* given_back = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const RemotePlace place = RemotePlace::of(given_back, 4096, arena);
  const PeerMemory memory(arena, -1);
  check(memory.mapped(place, 0, 4096) == nullptr, "expected memory that is not looked at directly", 0);
  int64_t number = 1;
  check(!memory.reads_everything() || memory.read(&number, place, 0, sizeof number), "expected to read it", 0);
  munmap(given_back, 4096);
  check(!memory.read(&number, place, 0, sizeof number), "expected not to read it", 0);
#endif
}

CollectiveState state_of(std::vector<Rank>& world, int rank, const std::vector<const Arena*>& arenas) {
  CollectiveState state{.rank = rank,
                        .layout = kTiny,
                        .members = {},
                        .arenas = &arenas,
                        .staging = nullptr,
                        .sources = {},
                        .direct_bytes = 0,
                        .exchanged_bytes = SIZE_MAX,
                        .reading = {},
                        .topology = Topology::one_host(static_cast<int>(world.size()), rank)};
  Engine& engine = *world[static_cast<size_t>(rank)].engine;
  std::vector<GroupMemoryView> readers;
  for (int member = 0; member < static_cast<int>(world.size()); ++member) {
    const auto index = static_cast<size_t>(member);
    state.members.emplace_back(*arenas[index], world[index].group->members().offset(), world.size(), kTiny);
    state.peers.push_back(member == rank ? nullptr : engine.peer_memory(member));
    if (member != rank) readers.push_back(state.members.back());
  }
  GroupHeap& heap = engine.heap();
  state.staging = std::make_unique<Staging>(heap.small_pool(kTiny, 1), heap.slots_pool(kTiny), state.mine(), readers);
  state.sources.resize(world.size());
  state.reads_everything = true;
  state.reading = ReadingRanges::all({.from = 0});
  return state;
}

// The owner gives up and its user reuses the array, while the reader is between agreement and reading: what it then
// reads is no result, and it goes on waiting, for the owner, until it learns why.
void what_is_read_after_the_exposure_does_not_count(OpKind op) {
  std::vector<Rank> world = make_world(2);
  const std::vector<const Arena*> arenas{&world[0].engine->arena(), &world[1].engine->arena()};
  CollectiveState states[2] = {state_of(world, 0, arenas), state_of(world, 1, arenas)};
  std::vector<int64_t> data[2] = {values(0, 500), values(1, 500)};
  Request requests[2] = {request_for(op, data[0], op == OpKind::kAllReduce ? -1 : 1),
                         request_for(op, data[1], op == OpKind::kAllReduce ? -1 : 1)};
  if (op == OpKind::kReduce) requests[0].descriptor.root = requests[1].descriptor.root = 0;
  for (Request& request : requests) request.descriptor.sequence = 1;
  CollectiveCall reader(states[0], requests[0]);
  CollectiveCall owner(states[1], requests[1]);
  check(owner.advance() == Progress::kWaiting, "the owner announces", 1);
  owner.give_up(Timeout{});
  data[1].assign(data[1].size(), -1);
  for (int look = 0; look < 3; ++look) {
    reader.advance();
    const std::string used = "used what the owner wrote after its call had failed: " + std::to_string(data[0][0]);
    check(!reader.is_completed(), used.c_str(), 0);
  }
  check(reader.missing() == std::vector<int>{1}, "expected to wait for the owner", 0);
}

}  // namespace

int main() {
  RUN_TEST(another_process);
  RUN_TEST(bytes_that_are_read_when_the_owner_has_ended_do_not_count);
  RUN_TEST(another_nonce_is_not_believed);
  RUN_TEST(memory_that_cannot_be_read_is_not_exposed);
  RUN_TEST(what_a_thread_gave_back_cannot_be_read);
  RUN_TEST(what_is_read_after_the_exposure_does_not_count, OpKind::kBroadcast);
  RUN_TEST(what_is_read_after_the_exposure_does_not_count, OpKind::kReduce);
}
