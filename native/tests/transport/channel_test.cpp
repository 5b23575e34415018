// Channels of every kind carry bytes in order, say when nothing moves, and say when the other side is gone.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

// The error number with which this call reports a closed channel, or -1 when it does not.
template <typename Call>
int closed_with(const Call& call) {
  try {
    call();
  } catch (const ChannelClosed& closed) {
    return closed.error_number;
  }
  return -1;
}

void bytes_arrive_in_order_through_a_small_ring_and_sockets() {
  constexpr size_t kTotal = 300'000;
  for (const LinkKind kind : kLinkKinds) {
    CASE("%s", link_name(kind));
    Links links(2, 1024);
    ChannelPair ends = links.connect(kind, 0, 1);
    std::thread writer([&] {
      std::mt19937 random(test_seed(1));
      std::vector<unsigned char> data(kTotal);
      for (size_t index = 0; index < kTotal; ++index) data[index] = static_cast<unsigned char>(index * 31 >> 3);
      for (size_t at = 0; at < kTotal;) {
        const size_t wanted = std::min<size_t>(kTotal - at, random() % 3000);
        const size_t moved = ends.first->write_some(data.data() + at, wanted);
        if (moved == 0) std::this_thread::yield();
        at += moved;
      }
    });
    std::mt19937 random(test_seed(2));
    std::vector<unsigned char> block(3000);
    for (size_t at = 0; at < kTotal;) {
      const size_t moved = ends.second->read_some(block.data(), random() % block.size());
      if (moved == 0) std::this_thread::yield();
      for (size_t index = 0; index < moved; ++index, ++at) {
        CHECK(block[index] == static_cast<unsigned char>(at * 31 >> 3));
      }
    }
    writer.join();
  }
}

void nothing_moves_when_empty_or_full() {
  for (const LinkKind kind : kLinkKinds) {
    CASE("%s", link_name(kind));
    Links links(2, 1024);
    ChannelPair ends = links.connect(kind, 0, 1);
    char byte = 0;
    CHECK(ends.second->read_some(&byte, 1) == 0);
    CHECK(ends.second->read_some(&byte, 0) == 0);
    CHECK(ends.first->write_some(&byte, 0) == 0);
    const std::vector<char> block(64 * 1024);
    while (ends.first->write_some(block.data(), block.size()) > 0) {
    }
    CHECK(ends.first->write_some(block.data(), block.size()) == 0);
  }
}

void what_was_written_before_closing_is_read_then_the_end_is_told() {
  for (const LinkKind kind : kLinkKinds) {
    CASE("%s", link_name(kind));
    Links links(2, 1024);
    ChannelPair ends = links.connect(kind, 0, 1);
    CHECK(ends.first->write_some("last words", 10) == 10);
    ends.first.reset();
    char text[16] = {};
    while (ends.second->read_some(text, 10) == 0) {
    }
    CHECK(std::strcmp(text, "last words") == 0);
    CHECK(closed_with([&] {
            while (ends.second->read_some(text, 1) == 0) {
            }
          }) == 0);
  }
}

void writing_to_a_closed_peer_throws_and_raises_no_signal() {
  for (const LinkKind kind : kLinkKinds) {
    CASE("%s", link_name(kind));
    Links links(2, 1024);
    ChannelPair ends = links.connect(kind, 0, 1);
    ends.second.reset();
    const int error = closed_with([&] {
      for (int attempt = 0; attempt < 1000; ++attempt) ends.first->write_some("x", 1);
    });
    CHECK(error == EPIPE || error == ECONNRESET);
  }
}

struct RawRings {
  static constexpr size_t kCapacity = 256;
  alignas(Ring::kLine) std::byte memory[2][sizeof(Ring) + kCapacity];
  Ring* outgoing = Ring::initialise(memory[0]);
  Ring* incoming = Ring::initialise(memory[1]);
};

void a_corrupted_ring_counter_is_refused() {
  for (const uint64_t corrupted : {uint64_t{257}, uint64_t{1} << 40, ~uint64_t{0}}) {
    CASE("counter %#zx", corrupted);
    RawRings rings;
    RingChannel channel(rings.outgoing, rings.incoming, RawRings::kCapacity, [] {});
    char bytes[512] = {};
    rings.incoming->head.store(corrupted, std::memory_order_release);
    CHECK(closed_with([&] { channel.read_some(bytes, sizeof bytes); }) == EPROTO);
    rings.outgoing->tail.store(corrupted >> 1, std::memory_order_release);
    CHECK(closed_with([&] { channel.write_some(bytes, sizeof bytes); }) == EPROTO);
  }
}

void a_ring_announces_what_it_publishes_and_consumes() {
  RawRings rings;
  int announced = 0;
  RingChannel here(rings.outgoing, rings.incoming, RawRings::kCapacity, [&] { ++announced; });
  RingChannel there(rings.incoming, rings.outgoing, RawRings::kCapacity, [] {});
  char bytes[512] = {};
  CHECK(here.read_some(bytes, 8) == 0 && announced == 0);
  CHECK(here.write_some(bytes, 8) == 8 && announced == 1);
  CHECK(there.write_some(bytes, sizeof bytes) == RawRings::kCapacity);
  CHECK(here.read_some(bytes, 100) == 100 && announced == 2);
}

void a_message_goes_and_comes_whole_around_the_end_of_a_ring() {
  RawRings rings;
  RingChannel here(rings.outgoing, rings.incoming, RawRings::kCapacity, [] {});
  RingChannel there(rings.incoming, rings.outgoing, RawRings::kCapacity, [] {});
  char bytes[RawRings::kCapacity];
  for (int turn = 0; turn < 100; ++turn) {
    char head[8] = "head";
    head[7] = static_cast<char>(turn);
    std::memset(bytes, turn, sizeof bytes);
    CHECK(here.write_whole(head, sizeof head, bytes, 91));
    CHECK(here.write_whole(head, sizeof head, bytes, 0));
    CHECK(!here.write_whole(head, sizeof head, bytes, sizeof bytes - 8));  // no room: nothing was written
    char seen[8];
    CHECK(there.peek(bytes, 200) == 107 && there.peek(seen, sizeof seen) == 107);
    CHECK(std::memcmp(seen, head, sizeof seen) == 0);
    std::memset(bytes, -1, sizeof bytes);
    there.take(sizeof seen, bytes, 91);
    CHECK(bytes[0] == turn && bytes[90] == turn && bytes[91] == -1);
    CHECK(there.peek(seen, sizeof seen) == 8 && seen[7] == turn);
    there.take(sizeof seen, bytes, 0);
    CHECK(there.peek(seen, sizeof seen) == 0);
  }
}

// A consumer announces room only where a producer may have found the ring full.
void a_ring_that_was_less_than_half_full_is_read_in_silence() {
  RawRings rings;
  int announced = 0;
  RingChannel here(rings.outgoing, rings.incoming, RawRings::kCapacity, [] {});
  RingChannel there(rings.incoming, rings.outgoing, RawRings::kCapacity, [&] { ++announced; });
  char bytes[RawRings::kCapacity] = {};
  CHECK(here.write_some(bytes, 100) == 100);
  CHECK(there.read_some(bytes, 60) == 60 && announced == 0);
  CHECK(here.write_some(bytes, sizeof bytes) == sizeof bytes - 40);
  CHECK(there.read_some(bytes, 1) == 1 && announced == 1);
}

void a_capacity_that_is_no_power_of_two_is_refused() {
  RawRings rings;
  bool refused = false;
  try {
    RingChannel channel(rings.outgoing, rings.incoming, 200, [] {});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(100);
  RUN_TEST(bytes_arrive_in_order_through_a_small_ring_and_sockets);
  RUN_TEST(nothing_moves_when_empty_or_full);
  RUN_TEST(what_was_written_before_closing_is_read_then_the_end_is_told);
  RUN_TEST(writing_to_a_closed_peer_throws_and_raises_no_signal);
  RUN_TEST(a_corrupted_ring_counter_is_refused);
  RUN_TEST(a_ring_announces_what_it_publishes_and_consumes);
  RUN_TEST(a_message_goes_and_comes_whole_around_the_end_of_a_ring);
  RUN_TEST(a_ring_that_was_less_than_half_full_is_read_in_silence);
  RUN_TEST(a_capacity_that_is_no_power_of_two_is_refused);
}
