// Large messages that are read from the sender's buffer: data counts only while the exposure lasts.
#include <signal.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <bit>
#include <tuple>
#include <vector>

#include "liveness/life.hpp"
#include "messages/single_copy.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"
#include "tests/messages/messages_fixture.hpp"

namespace procgroup::testing {
namespace {

constexpr size_t kBlock = kMiB;  // read in one turn

// A rank's arena, with its exposure table.
struct Exposer {
  explicit Exposer(int rank) : arena(Arena::create(rank)), life(arena.header().life) {
    arena.header().exposure_tables = arena.allocate(sizeof(ExposureTable));
    new (&table()) ExposureTable;
  }
  ExposureTable& table() const {
    return *reinterpret_cast<ExposureTable*>(arena.at(arena.header().exposure_tables, sizeof(ExposureTable)));
  }
  Arena arena;
  LifeLock life;
};

enum class Reading { kAllowed, kArenaOnly };

// A socket whose other end belongs to no process whose memory can be read.
struct Stranger {
  FileDescriptor ends[2] = {};
  Stranger() { std::tie(ends[0], ends[1]) = tcp_sockets(); }
};

// Two ranks in one thread that expose to each other; the test decides the order of events.
struct SingleCopyPair {
  explicit SingleCopyPair(Reading reading = Reading::kAllowed)
      : second_reads(exposers[0].arena, reading == Reading::kAllowed ? -1 : stranger.ends[0].get()),
        first_reads(exposers[1].arena, reading == Reading::kAllowed ? -1 : stranger.ends[1].get()) {
    ChannelPair ends = links.connect(LinkKind::kRing, 0, 1);
    const SingleCopy exposed[] = {single_copy(0, first_reads), single_copy(1, second_reads)};
    first.attach(1, std::move(ends.first), &exposed[0]);
    second.attach(0, std::move(ends.second), &exposed[1]);
  }
  SingleCopy single_copy(int rank, const PeerMemory& peer) const {
    return {.mine = &exposers[rank].table(),
            .theirs = &exposers[1 - rank].table(),
            .peer = &peer,
            .own = &exposers[rank].arena,
            .from = 100'000,
            .from_behind_others = 70'000};
  }
  void settle() {
    while (int{first.pump()} + int{second.pump()} > 0) {
    }
  }
  bool exposes_anything() const {
    for (uint64_t number = 1; number <= 20; ++number)
      if (exposers[0].table().find(number) || exposers[1].table().find(number)) return true;
    return false;
  }
  Stranger stranger;
  Exposer exposers[2] = {Exposer(0), Exposer(1)};
  PeerMemory second_reads;
  PeerMemory first_reads;
  Links links{2};
  Messages first{0, 2};
  Messages second{1, 2};
};

// Pump until this many blocks of the only message were read.
void read_blocks(SingleCopyPair& pair, int blocks) {
  pair.first.pump();  // the announcement leaves
  for (int block = 0; block < blocks; ++block) CHECK(pair.second.pump());
}

void every_size_arrives_both_ways(Reading reading) {
  SingleCopyPair pair(reading);
  for (const size_t size : {size_t{99'999}, size_t{100'000}, kBlock, kBlock + 1, 3 * kBlock, 5 * kBlock + 17}) {
    CASE("%zu bytes", size);
    const Bytes sent[2] = {pattern(size, 1), pattern(size, 2)};
    Bytes received[2] = {Bytes(size), Bytes(size)};
    const TransferPtr transfers[] = {pair.first.send(1, {1, 1}, sent[0].data(), size),
                                     pair.second.send(0, {1, 1}, sent[1].data(), size),
                                     pair.second.receive(0, {1, 1}, received[0].data(), size),
                                     pair.first.receive(1, {1, 1}, received[1].data(), size)};
    pair.settle();
    CHECK(std::ranges::all_of(transfers, succeeded));
    CHECK(received[0] == sent[0] && received[1] == sent[1] && transfers[2]->bytes == size);
    CHECK(!pair.exposes_anything() && pair.first.flushed() && pair.second.flushed() && pair.first.is_quiet());
  }
}

void every_size_arrives_also_where_nothing_can_be_read() {
  every_size_arrives_both_ways(Reading::kAllowed);
  every_size_arrives_both_ways(Reading::kArenaOnly);
}

void an_array_in_the_arena_is_read_through_the_mapping() {
  SingleCopyPair pair(Reading::kArenaOnly);
  const Bytes content = pattern(2 * kBlock, 3);
  std::byte* shared = pair.exposers[0].arena.at(pair.exposers[0].arena.allocate(content.size()), content.size());
  std::memcpy(shared, content.data(), content.size());
  Bytes into(content.size());
  auto send = pair.first.send(1, {1, 1}, shared, content.size());
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  pair.settle();
  CHECK(succeeded(send) && succeeded(receive) && into == content);
}

// More messages at a time than the exposure table has entries: the rest are streamed.
void many_messages_at_a_time_arrive() {
  SingleCopyPair pair;
  std::vector<Bytes> sent;
  std::vector<Bytes> received(3 * ExposureTable::kEntries, Bytes(200'000));
  std::vector<TransferPtr> transfers;
  for (unsigned index = 0; index < received.size(); ++index) sent.push_back(pattern(200'000, index));
  for (const Bytes& data : sent) transfers.push_back(pair.first.send(1, {1, 1}, data.data(), data.size()));
  for (Bytes& data : received) transfers.push_back(pair.second.receive(0, {1, 1}, data.data(), data.size()));
  pair.settle();
  CHECK(std::ranges::all_of(transfers, succeeded) && received == sent && !pair.exposes_anything());
}

// The first of them is not behind another one: it is streamed.
void a_message_behind_others_is_exposed_from_a_smaller_size_on() {
  const size_t size = 80'000;
  SingleCopyPair pair;
  const std::vector<Bytes> sent{pattern(size, 1), pattern(size, 2), pattern(size, 3)};
  std::vector<Bytes> received(sent.size(), Bytes(size));
  std::vector<TransferPtr> transfers;
  for (const Bytes& data : sent) transfers.push_back(pair.first.send(1, {1, 1}, data.data(), data.size()));
  const ExposureTable& table = pair.exposers[0].table();
  CHECK(!table.find(1) && table.find(2) && table.find(3));
  for (Bytes& data : received) transfers.push_back(pair.second.receive(0, {1, 1}, data.data(), data.size()));
  pair.settle();
  CHECK(std::ranges::all_of(transfers, succeeded) && received == sent && !pair.exposes_anything());
}

void another_size_is_refused_before_a_byte_moves() {
  SingleCopyPair pair;
  const Bytes sent = pattern(2 * kBlock, 1);
  Bytes into(sent.size() + 8);
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  auto send = pair.first.send(1, {1, 1}, sent.data(), sent.size());
  pair.settle();
  CHECK(failed_as<Mismatch>(receive) && failed_as<Failed>(send));
  CHECK(std::ranges::all_of(into, [](unsigned char byte) { return byte == 0; }) && !pair.exposes_anything());
}

void a_small_message_overtakes_a_large_one_that_is_read() {
  SingleCopyPair pair;
  const Bytes large = pattern(8 * kBlock, 1);
  Bytes into(large.size());
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  auto send = pair.first.send(1, {1, 1}, large.data(), large.size());
  read_blocks(pair, 2);
  int sent = 7;
  int got = 0;
  pair.first.send(1, {1, 2}, &sent, sizeof sent);
  auto small = pair.second.receive(0, {1, 2}, &got, sizeof got);
  read_blocks(pair, 2);
  CHECK(succeeded(small) && got == 7 && !receive->is_completed() && !send->is_completed());
  CHECK(!pair.second.is_quiet());
  pair.settle();
  CHECK(succeeded(send) && succeeded(receive) && into == large);
}

// The send is cancelled when all but the last block was read, and its user writes into the array at once.
void a_send_that_is_cancelled_in_mid_read_is_no_message() {
  for (const int blocks : {1, 2}) {
    CASE("%d blocks", blocks);
    SingleCopyPair pair;
    Bytes large = pattern(3 * kBlock, 1);
    Bytes into(large.size());
    auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
    auto send = pair.first.send(1, {1, 1}, large.data(), large.size());
    read_blocks(pair, blocks);
    pair.first.cancel(*send, kCancelled);
    CHECK(failed_as<Timeout>(send) && !pair.exposes_anything());
    std::ranges::fill(large, static_cast<unsigned char>(0xee));
    pair.settle();
    CHECK(failed_as<Failed>(receive) && pair.first.flushed() && pair.second.is_quiet());
    auto next = pair.first.send(1, {1, 1}, large.data(), large.size());
    auto good = pair.second.receive(0, {1, 1}, into.data(), into.size());
    pair.settle();
    CHECK(succeeded(next) && succeeded(good) && into == large);
  }
}

// Rank 1 with a real reader, beside a raw channel on which the test writes the frames of rank 0.
struct Reader {
  explicit Reader(const Arena& theirs, const PeerMemory& peer) {
    ChannelPair ends = links.connect(LinkKind::kUnixSocket, 0, 1);
    raw = std::move(ends.first);
    const SingleCopy single_copy{.mine = &own.table(),
                                 .theirs = reinterpret_cast<const ExposureTable*>(
                                     theirs.at(theirs.header().exposure_tables, sizeof(ExposureTable))),
                                 .peer = &peer,
                                 .own = &own.arena};
    messages.attach(0, std::move(ends.second), &single_copy);
  }
  void announce(uint64_t number, size_t bytes) {
    const FrameHeader header{.kind = FrameKind::kAnnounce, .key = {1, 1}, .number = number, .bytes = bytes};
    CHECK(raw->write_some(&header, sizeof header) == sizeof header);
  }
  FrameHeader answer() {
    FrameHeader header{};
    CHECK(raw->read_some(&header, sizeof header) == sizeof header);
    return header;
  }
  void settle() {
    while (messages.pump()) {
    }
  }
  Exposer own{1};
  Links links{2};
  std::unique_ptr<Channel> raw;
  Messages messages{1, 2};
};

// The withdrawal has not come yet, or never will: only the exposure table shows that the exposure has ended.
void what_is_read_after_the_exposure_does_not_count() {
  Exposer owner(0);
  const PeerMemory peer(owner.arena, -1);
  Reader reader(owner.arena, peer);
  const Bytes large = pattern(2 * kBlock, 1);
  Bytes into(large.size());
  auto receive = reader.messages.receive(0, {1, 1}, into.data(), into.size());
  {
    const Exposure exposure(owner.table(), 1, RemotePlace::of(large.data(), large.size(), owner.arena));
    reader.announce(1, large.size());
    CHECK(reader.messages.pump() && into[0] == large[0] && into[1] == large[1]);
  }
  reader.settle();
  const FrameHeader answer = reader.answer();
  CHECK(!receive->is_completed() && answer.kind == FrameKind::kGrant && answer.number == 1);
}

// A forked process, which has this one's memory at the same addresses.
class Copy {
 public:
  Copy() {
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t bytes = sizeof(sa_family_t);
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), bytes) == 0 && listen(listener, 1) == 0);
    bytes = sizeof address;
    CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      alarm(60);
      const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(connection, reinterpret_cast<sockaddr*>(&address), bytes) != 0) _exit(1);
      for (;;) pause();
    }
    socket_ = FileDescriptor(accept(listener, nullptr, nullptr));
    close(listener);
  }
  Copy(const Copy&) = delete;
  ~Copy() { end(); }
  void end() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  int socket_descriptor() const { return socket_.get(); }

 private:
  pid_t pid_ = 0;
  FileDescriptor socket_;
};

// The receiver requests the rest as a stream, until the life watcher reports that the sender is lost.
void a_sender_that_dies_in_mid_read_is_lost() {
  const Bytes large = pattern(4 * kBlock, 1);
  const uint64_t nonce = 0x1234567;
  Copy sender;
  Exposer owner(0);
  owner.arena.header().nonce = nonce;
  owner.arena.header().nonce_address = reinterpret_cast<uintptr_t>(&nonce);
  const PeerMemory peer(owner.arena, sender.socket_descriptor());
  if (!peer.reads_everything()) {
    std::fputs("(the kernel forbids to read other processes)", stderr);
    return;
  }
  Reader reader(owner.arena, peer);
  Bytes into(large.size());
  auto receive = reader.messages.receive(0, {1, 1}, into.data(), into.size());
  const Exposure exposure(owner.table(), 1, RemotePlace::of(large.data(), large.size(), owner.arena));
  reader.announce(1, large.size());
  CHECK(reader.messages.pump() && std::equal(into.begin(), into.begin() + kBlock, large.begin()));
  sender.end();
  reader.settle();
  CHECK(!receive->is_completed() && reader.answer().kind == FrameKind::kGrant);
  reader.messages.fail_peer(0, Lost{.peer = 0, .pid = 5});
  CHECK(failed_as<Lost>(receive));
}

void a_whole_message_is_read_from_another_process() {
  const Bytes large = pattern(2 * kBlock + 5, 1);
  const uint64_t nonce = 0x7654321;
  Copy sender;
  Exposer owner(0);
  owner.arena.header().nonce = nonce;
  owner.arena.header().nonce_address = reinterpret_cast<uintptr_t>(&nonce);
  const PeerMemory peer(owner.arena, sender.socket_descriptor());
  if (!peer.reads_everything()) return;
  Reader reader(owner.arena, peer);
  Bytes into(large.size());
  auto receive = reader.messages.receive(0, {1, 1}, into.data(), into.size());
  const Exposure exposure(owner.table(), 1, RemotePlace::of(large.data(), large.size(), owner.arena));
  reader.announce(1, large.size());
  reader.settle();
  CHECK(succeeded(receive) && into == large && reader.answer().kind == FrameKind::kTaken);
}

// Places that no correct peer names: outside of its arena, or nowhere.
void a_place_that_does_not_exist_harms_nobody() {
  Exposer hostile(0);
  const PeerMemory peer(hostile.arena, -1);
  for (const uint64_t place : {~uint64_t{0}, uint64_t{1} << 63 | uint64_t{1} << 40, uint64_t{8}, ~uint64_t{0} >> 1}) {
    CASE("place %#zx", place);
    Reader reader(hostile.arena, peer);
    Bytes into(2 * kBlock);
    auto receive = reader.messages.receive(0, {1, 1}, into.data(), into.size());
    const Exposure exposure(hostile.table(), 1, std::bit_cast<RemotePlace>(place));
    reader.announce(1, into.size());
    reader.settle();
    if (receive->is_completed()) {
      CHECK(failed_as<Lost>(receive) && !reader.messages.attached(0));
    } else {
      CHECK(reader.answer().kind == FrameKind::kGrant);
    }
  }
}

void one_number_for_two_exposures_ends_that_peer() {
  Exposer hostile(0);
  const PeerMemory peer(hostile.arena, -1);
  Reader reader(hostile.arena, peer);
  const Bytes large = pattern(4 * kBlock, 1);
  Bytes into[2] = {Bytes(large.size()), Bytes(large.size())};
  const TransferPtr receives[] = {reader.messages.receive(0, {1, 1}, into[0].data(), large.size()),
                                  reader.messages.receive(0, {1, 1}, into[1].data(), large.size())};
  const Exposure exposure(hostile.table(), 1, RemotePlace::of(large.data(), large.size(), hostile.arena));
  reader.announce(1, large.size());
  reader.announce(1, large.size());
  reader.settle();
  for (const TransferPtr& receive : receives) CHECK(failed_as<Lost>(receive));
}

// A peer acknowledges a message that is not exposed to it: one that was granted, or that does not exist.
void only_what_is_exposed_can_be_taken() {
  Victim victim;
  const Bytes large = pattern(2 * kEagerBytes, 1);
  auto send = victim.messages.send(1, {1, 1}, large.data(), large.size());
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}})
    victim.write({.kind = FrameKind::kTaken, .number = number});
  victim.settle();
  CHECK(!send->is_completed() && victim.messages.attached(1));
  victim.check_that_rank_2_is_unharmed();
}

// The receiver's buffer is freed at once: a sanitizer reports a late write.
void a_receive_that_is_cancelled_in_mid_read_fails_the_send() {
  SingleCopyPair pair;
  const Bytes large = pattern(3 * kBlock, 1);
  auto into = std::make_unique<Bytes>(large.size());
  auto receive = pair.second.receive(0, {1, 1}, into->data(), into->size());
  auto send = pair.first.send(1, {1, 1}, large.data(), large.size());
  read_blocks(pair, 1);
  pair.second.cancel(*receive, kCancelled);
  into.reset();
  pair.settle();
  CHECK(failed_as<Timeout>(receive) && failed_as<Failed>(send));
  CHECK(!pair.exposes_anything() && pair.first.flushed() && pair.second.is_quiet());
}

void a_receiver_that_is_lost_in_mid_read_ends_the_exposure() {
  SingleCopyPair pair;
  const Bytes large = pattern(3 * kBlock, 1);
  Bytes into(large.size());
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  auto send = pair.first.send(1, {1, 1}, large.data(), large.size());
  read_blocks(pair, 1);
  pair.first.fail_peer(1, Lost{.peer = 1, .pid = 5});
  CHECK(failed_as<Lost>(send) && !pair.exposes_anything());
  pair.settle();
  CHECK(failed_as<Lost>(receive));
}

void exposures_end_with_their_messages() {
  SingleCopyPair pair;
  const Bytes large = pattern(kBlock, 1);
  {
    Links links(2);
    Messages short_lived(0, 2);
    ChannelPair ends = links.connect(LinkKind::kUnixSocket, 0, 1);
    const SingleCopy single_copy = pair.single_copy(0, pair.first_reads);
    short_lived.attach(1, std::move(ends.first), &single_copy);
    short_lived.send(1, {1, 1}, large.data(), large.size());
    CHECK(pair.exposes_anything());
  }
  CHECK(!pair.exposes_anything());
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_size_arrives_also_where_nothing_can_be_read);
  RUN_TEST(an_array_in_the_arena_is_read_through_the_mapping);
  RUN_TEST(many_messages_at_a_time_arrive);
  RUN_TEST(a_message_behind_others_is_exposed_from_a_smaller_size_on);
  RUN_TEST(another_size_is_refused_before_a_byte_moves);
  RUN_TEST(a_small_message_overtakes_a_large_one_that_is_read);
  RUN_TEST(a_send_that_is_cancelled_in_mid_read_is_no_message);
  RUN_TEST(what_is_read_after_the_exposure_does_not_count);
  RUN_TEST(a_sender_that_dies_in_mid_read_is_lost);
  RUN_TEST(a_whole_message_is_read_from_another_process);
  RUN_TEST(a_place_that_does_not_exist_harms_nobody);
  RUN_TEST(one_number_for_two_exposures_ends_that_peer);
  RUN_TEST(only_what_is_exposed_can_be_taken);
  RUN_TEST(a_receive_that_is_cancelled_in_mid_read_fails_the_send);
  RUN_TEST(a_receiver_that_is_lost_in_mid_read_ends_the_exposure);
  RUN_TEST(exposures_end_with_their_messages);
}
