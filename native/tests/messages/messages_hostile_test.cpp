// A hostile or flooding peer harms itself only.
#include <algorithm>
#include <random>
#include <vector>

#include "tests/check.hpp"
#include "tests/links.hpp"
#include "tests/messages/messages_fixture.hpp"

namespace procgroup::testing {
namespace {

// 80 MiB for which no receive is posted: the receiver keeps 64 MiB, leaves the rest in the channel, and gets all of it
// later.
void unexpected_messages_are_bounded_and_none_is_lost() {
  constexpr size_t kMessages = 80 * kMiB / kEagerBytes;
  Pair pair;
  const Bytes data = pattern(kEagerBytes, 1);
  Bytes into(kEagerBytes);
  std::vector<TransferPtr> sends;
  for (size_t index = 0; index < kMessages; ++index) {
    sends.push_back(pair.first.send(1, {1, 1}, data.data(), data.size()));
    pair.second.pump();
  }
  pair.settle();
  CHECK(!sends.back()->is_completed());
  std::vector<pollfd> descriptors;
  pair.second.descriptors(descriptors);
  CHECK(descriptors.empty());
  for (size_t index = 0; index < kMessages; ++index) {
    auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
    pair.settle();
    CHECK(succeeded(receive) && into == data);
  }
  CHECK(succeeded(sends.back()));
}

bool is_lost(Victim& victim) { return !victim.messages.attached(1); }

void frames_that_no_correct_peer_sends_end_that_peer_only() {
  const FrameHeader malformed[] = {
      {.magic = 1, .kind = FrameKind::kEager},
      {.kind = static_cast<FrameKind>(17)},
      {.kind = FrameKind::kEager, .bytes = kEagerBytes + 1},
      {.kind = FrameKind::kEager, .bytes = ~uint64_t{0}},
      {.kind = FrameKind::kAnnounce, .bytes = kEagerBytes},
      {.kind = FrameKind::kData, .number = 5, .bytes = 100},
      {.kind = FrameKind::kData, .bytes = kBulkBytes + 1},
      {.kind = FrameKind::kData, .bytes = 0},
  };
  for (const FrameHeader& header : malformed) {
    CASE("frame %td", &header - malformed);
    Victim victim;
    int never = 0;
    auto receive = victim.messages.receive(1, {1, 1}, &never, sizeof never);
    victim.write(header);
    victim.settle();
    CHECK(is_lost(victim) && failed_as<Lost>(receive));
    victim.check_that_rank_2_is_unharmed();
  }
}

void more_data_than_announced_and_a_number_used_twice_end_that_peer() {
  for (const bool twice : {true, false}) {
    CASE("%s", twice ? "a number used twice" : "more data than announced");
    Victim victim;
    Bytes into(2 * kEagerBytes);
    auto first = victim.messages.receive(1, {1, 1}, into.data(), into.size());
    auto second = victim.messages.receive(1, {1, 1}, into.data(), into.size());
    const FrameHeader announce{.kind = FrameKind::kAnnounce, .key = {1, 1}, .number = 3, .bytes = into.size()};
    victim.write(announce);
    if (twice) {
      victim.write(announce);
    } else {
      victim.write({.kind = FrameKind::kData, .number = 3, .bytes = into.size() + 1});
    }
    victim.settle();
    CHECK(is_lost(victim) && failed_as<Lost>(first) && failed_as<Lost>(second));
    victim.check_that_rank_2_is_unharmed();
  }
}

void answers_to_unknown_messages_are_ignored() {
  Victim victim;
  for (const FrameKind kind : {FrameKind::kGrant, FrameKind::kRefuse, FrameKind::kWithdraw, FrameKind::kTaken}) {
    victim.write({.kind = kind, .key = {1, 1}, .number = 12345, .bytes = ~uint64_t{0}});
  }
  victim.settle();
  CHECK(!is_lost(victim));
  victim.check_that_rank_2_is_unharmed();
}

// A header that is often valid, with fields that are often at an edge.
FrameHeader random_header(std::mt19937& random) {
  const uint64_t edges[] = {0, 1, 3, 100, kEagerBytes, kEagerBytes + 1, kBulkBytes, ~uint64_t{0}};
  FrameHeader header{.kind = static_cast<FrameKind>(random() % 8)};
  header.key = {random() % 2, random() % 2};
  header.number = random() % 4;
  header.bytes = edges[random() % std::size(edges)];
  if (random() % 50 == 0) header.magic = random();
  return header;
}

void random_frames_and_random_bytes_harm_nobody_else() {
  const unsigned seed = test_seed(7);
  std::mt19937 random(seed);
  for (int round = 0; round < 400; ++round) {
    CASE("seed %u, round %d", seed, round);
    Victim victim;
    Bytes buffers[4] = {Bytes(3), Bytes(100), Bytes(kEagerBytes), Bytes(kEagerBytes + 1)};
    std::vector<TransferPtr> transfers;
    for (Bytes& buffer : buffers) {
      transfers.push_back(victim.messages.receive(random() % 4 == 0 ? kAnySource : 1, {random() % 2, random() % 2},
                                                  buffer.data(), buffer.size()));
      transfers.push_back(victim.messages.send(1, {1, 1}, buffer.data(), buffer.size()));
    }
    try {
      for (int frame = 0; frame < 30 && !is_lost(victim); ++frame) {
        const FrameHeader header = random_header(random);
        if (round % 4 != 0) victim.write(header);
        Bytes payload(random() % 3 == 0 ? random() % 500 : std::min<uint64_t>(header.bytes, kBulkBytes));
        for (unsigned char& byte : payload) byte = static_cast<unsigned char>(random());
        if (round % 4 == 0 || header.kind == FrameKind::kEager || header.kind == FrameKind::kData) {
          victim.write(payload.data(), payload.size());
        }
        if (random() % 8 == 0) victim.messages.cancel(*transfers[random() % transfers.size()], kCancelled);
      }
    } catch (const ChannelClosed&) {
      // the victim has closed the connection
    }
    victim.raw.reset();
    victim.settle();
    CHECK(is_lost(victim));
    for (size_t index = 1; index < transfers.size(); index += 2) CHECK(transfers[index]->is_completed());
    victim.check_that_rank_2_is_unharmed();
  }
}

void a_flood_of_empty_messages_is_bounded() {
  Victim victim;
  const std::vector<FrameHeader> flood(1000, FrameHeader{.kind = FrameKind::kEager, .key = {1, 1}});
  const auto* bytes = reinterpret_cast<const std::byte*>(flood.data());
  size_t written = 0;
  size_t last = 0;
  do {
    last = 0;
    for (size_t at = 0; at < flood.size() * sizeof(FrameHeader);) {
      const size_t moved = victim.raw->write_some(bytes + at, flood.size() * sizeof(FrameHeader) - at);
      at += moved;
      last += moved;
      if (!victim.messages.pump() && moved == 0) break;
    }
    written += last;
  } while (last == flood.size() * sizeof(FrameHeader));
  CHECK(written < 64 * kMiB);
  victim.check_that_rank_2_is_unharmed();
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(unexpected_messages_are_bounded_and_none_is_lost);
  RUN_TEST(frames_that_no_correct_peer_sends_end_that_peer_only);
  RUN_TEST(more_data_than_announced_and_a_number_used_twice_end_that_peer);
  RUN_TEST(answers_to_unknown_messages_are_ignored);
  RUN_TEST(random_frames_and_random_bytes_harm_nobody_else);
  RUN_TEST(a_flood_of_empty_messages_is_bounded);
}
