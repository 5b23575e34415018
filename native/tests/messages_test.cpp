// Messages between ranks: every size, order, any source, fairness, cancelling, failing, hostile peers.

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "engine/frame.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

using Bytes = std::vector<unsigned char>;
using TransferPtr = std::shared_ptr<Transfer>;

constexpr size_t kMiB = 1024 * 1024;
constexpr size_t kSizes[] = {0,    1,        8,         4096,      kEagerBytes - 1, kEagerBytes,    kEagerBytes + 1,
                             8152, 8 * 1024, 60 * 1000, 70 * 1000, kBulkBytes,      kBulkBytes + 1, kMiB + 17};

Bytes pattern(size_t bytes, unsigned seed) {
  Bytes data(bytes);
  for (size_t index = 0; index < bytes; ++index)
    data[index] = static_cast<unsigned char>((index * 7 + seed * 131) >> 2);
  return data;
}

bool succeeded(const TransferPtr& transfer) { return transfer->is_over() && transfer->failure() == nullptr; }

bool failed_as(const TransferPtr& transfer, Failure::Kind kind) {
  return transfer->is_over() && transfer->failure() != nullptr && transfer->failure()->kind == kind;
}

// Two ranks in one thread: what happens when is then decided by the test.
struct Pair {
  explicit Pair(LinkKind kind = LinkKind::kUnixSocket) {
    ChannelPair ends = links.connect(kind, 0, 1);
    first.attach(1, std::move(ends.first));
    second.attach(0, std::move(ends.second));
  }
  void settle() {
    while (int{first.pump()} + int{second.pump()} > 0) {
    }
  }
  Links links{2};
  Messages first{0, 2};
  Messages second{1, 2};
};

// Rank 0 of two, beside a raw channel on which the test writes what a hostile or dying peer would.
struct Victim {
  Victim() {
    ChannelPair ends = links.connect(LinkKind::kUnixSocket, 0, 1);
    messages.attach(1, std::move(ends.first));
    raw = std::move(ends.second);
    ChannelPair honest = links.connect(LinkKind::kUnixSocket, 0, 2);
    messages.attach(2, std::move(honest.first));
    friendly.attach(0, std::move(honest.second));
  }
  void write(const void* data, size_t bytes) {
    const auto* at = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const size_t moved = raw->write_some(at, bytes);
      at += moved;
      bytes -= moved;
      messages.pump();
    }
  }
  void write(const FrameHeader& header) { write(&header, sizeof header); }
  void settle() {
    while (messages.pump()) {
    }
  }
  void check_that_rank_2_is_unharmed() {
    uint64_t sent = 42;
    uint64_t received = 0;
    auto send = friendly.send(0, {9, 9}, &sent, sizeof sent);
    auto receive = messages.receive(2, {9, 9}, &received, sizeof received);
    while (!receive->is_over()) {
      friendly.pump();
      messages.pump();
    }
    CHECK(succeeded(send) && succeeded(receive) && received == 42);
  }
  Links links{3};
  Messages messages{0, 3};
  Messages friendly{2, 3};
  std::unique_ptr<Channel> raw;
};

void every_size_arrives_both_ways_over_every_link() {
  for (const LinkKind kind : kLinkKinds) {
    run_ranks(2, kind, 64 * 1024, [](int rank, Messages& messages, Doorbell& doorbell) {
      for (const size_t size : kSizes) {
        const Bytes sent = pattern(size, static_cast<unsigned>(rank));
        Bytes received(size);
        auto send = messages.send(1 - rank, {1, size}, sent.data(), size);
        auto receive = messages.receive(1 - rank, {1, size}, received.data(), size);
        pump_until(messages, doorbell, [&] { return send->is_over() && receive->is_over(); });
        CHECK(succeeded(send) && succeeded(receive));
        CHECK(receive->source == 1 - rank && receive->bytes == size);
        CHECK(received == pattern(size, static_cast<unsigned>(1 - rank)));
      }
    });
  }
}

struct Planned {
  int from;
  int to;
  uint64_t tag;
  size_t size;
  unsigned seed;
};

std::vector<Planned> random_schedule(int ranks, int messages, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Planned> schedule;
  for (int index = 0; index < messages; ++index) {
    const int from = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const int to = (from + 1 + static_cast<int>(random() % static_cast<unsigned>(ranks - 1))) % ranks;
    schedule.push_back({from, to, random() % 3, kSizes[random() % std::size(kSizes)], static_cast<unsigned>(random())});
  }
  return schedule;
}

// The receives of one rank in random order, but in the sent order under each key: that order is promised.
std::vector<Planned> shuffled_receives(const std::vector<Planned>& schedule, int rank, unsigned seed) {
  std::vector<Planned> mine;
  std::copy_if(schedule.begin(), schedule.end(), std::back_inserter(mine),
               [&](const Planned& planned) { return planned.to == rank; });
  std::vector<Planned> order = mine;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::map<std::pair<int, uint64_t>, size_t> next;
  for (Planned& slot : order) {
    size_t& position = next[{slot.from, slot.tag}];
    while (mine[position].from != slot.from || mine[position].tag != slot.tag) ++position;
    slot = mine[position++];
  }
  return order;
}

void run_schedule(const std::vector<Planned>& schedule, unsigned seed, int rank, Messages& messages,
                  Doorbell& doorbell) {
  std::vector<std::pair<TransferPtr, Bytes>> sends;
  std::vector<std::tuple<TransferPtr, Bytes, Planned>> receives;
  for (const Planned& planned : schedule) {
    if (planned.from != rank) continue;
    sends.emplace_back(nullptr, pattern(planned.size, planned.seed));
    sends.back().first = messages.send(planned.to, {5, planned.tag}, sends.back().second.data(), planned.size);
  }
  for (const Planned& planned : shuffled_receives(schedule, rank, seed + static_cast<unsigned>(rank))) {
    receives.emplace_back(nullptr, Bytes(planned.size), planned);
    std::get<0>(receives.back()) =
        messages.receive(planned.from, {5, planned.tag}, std::get<1>(receives.back()).data(), planned.size);
    if (planned.seed % 3 == 0) messages.pump();
  }
  pump_until(messages, doorbell, [&] {
    return std::all_of(sends.begin(), sends.end(), [](const auto& send) { return send.first->is_over(); }) &&
           std::all_of(receives.begin(), receives.end(),
                       [](const auto& entry) { return std::get<0>(entry)->is_over(); });
  });
  for (const auto& [send, data] : sends) CHECK(succeeded(send));
  for (const auto& [receive, data, planned] : receives) {
    CHECK(succeeded(receive) && data == pattern(planned.size, planned.seed));
  }
}

void random_schedules_deliver_every_message_in_order() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int ranks : {2, 3, 4, 7}) {
      const unsigned seed = static_cast<unsigned>(ranks) * 10 + static_cast<unsigned>(kind);
      const std::vector<Planned> schedule = random_schedule(ranks, 60, seed);
      run_ranks(ranks, kind, 16 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
        run_schedule(schedule, seed, rank, messages, doorbell);
      });
    }
  }
}

void large_sends_head_to_head_do_not_block_each_other() {
  for (const LinkKind kind : kLinkKinds) {
    run_ranks(2, kind, 4096, [](int rank, Messages& messages, Doorbell& doorbell) {
      const Bytes sent = pattern(4 * kMiB, static_cast<unsigned>(rank));
      Bytes received(sent.size());
      auto send = messages.send(1 - rank, {1, 1}, sent.data(), sent.size());
      for (int round = 0; round < 10; ++round) messages.pump();
      auto receive = messages.receive(1 - rank, {1, 1}, received.data(), received.size());
      pump_until(messages, doorbell, [&] { return send->is_over() && receive->is_over(); });
      CHECK(received == pattern(received.size(), static_cast<unsigned>(1 - rank)));
    });
  }
}

void a_small_message_overtakes_a_large_one_that_streams() {
  Pair pair(LinkKind::kRing);
  const Bytes large = pattern(16 * kMiB, 1);
  Bytes into(large.size());
  auto stream = pair.second.receive(0, {1, 1}, into.data(), into.size());
  auto send = pair.first.send(1, {1, 1}, large.data(), large.size());
  for (int round = 0; round < 4; ++round) CHECK(int{pair.first.pump()} + int{pair.second.pump()} > 0);
  int sent = 7;
  int received = 0;
  pair.first.send(1, {1, 2}, &sent, sizeof sent);
  auto small = pair.second.receive(0, {1, 2}, &received, sizeof received);
  while (!small->is_over()) CHECK(int{pair.first.pump()} + int{pair.second.pump()} > 0);
  CHECK(received == 7 && !stream->is_over());
  pair.settle();
  CHECK(succeeded(send) && succeeded(stream) && into == large);
}

void any_source_takes_the_named_sources_only() {
  run_ranks(3, LinkKind::kUnixSocket, 0, [](int rank, Messages& messages, Doorbell& doorbell) {
    if (rank > 0) {
      auto send = messages.send(0, {1, 1}, &rank, sizeof rank);
      return pump_until(messages, doorbell, [&] { return send->is_over(); });
    }
    const std::vector<int> only_second{2};
    const std::vector<int> both{1, 2};
    int from_second = -1;
    int other = -1;
    auto first_receive = messages.receive(kAnySource, {1, 1}, &from_second, sizeof(int), &only_second);
    auto second_receive = messages.receive(kAnySource, {1, 1}, &other, sizeof(int), &both);
    pump_until(messages, doorbell, [&] { return first_receive->is_over() && second_receive->is_over(); });
    CHECK(from_second == 2 && first_receive->source == 2);
    CHECK(other == 1 && second_receive->source == 1);
  });
}

void a_size_that_differs_fails_that_receive_and_nothing_else() {
  for (const size_t size : {size_t{8}, 2 * kEagerBytes}) {
    for (const bool receive_first : {true, false}) {
      Pair pair;
      const Bytes sent = pattern(size, 1);
      Bytes into(size + 1);
      TransferPtr receive;
      if (receive_first) receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
      auto send = pair.first.send(1, {1, 1}, sent.data(), size);
      pair.settle();
      if (!receive_first) receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
      pair.settle();
      CHECK(failed_as(receive, Failure::Kind::kFailed) && receive->failure()->peer == 0);
      CHECK(receive->failure()->reason.find(std::to_string(size + 1)) != std::string::npos);
      CHECK(size <= kEagerBytes ? succeeded(send) : failed_as(send, Failure::Kind::kFailed));
      CHECK(std::all_of(into.begin(), into.end(), [](unsigned char byte) { return byte == 0; }));
      auto next = pair.first.send(1, {1, 1}, sent.data(), size);
      auto good = pair.second.receive(0, {1, 1}, into.data(), size);
      pair.settle();
      CHECK(succeeded(next) && succeeded(good));
    }
  }
}

const Failure kGivenUp{Failure::Kind::kTimeout, -1, 0, "", 1.5, {}, {}};

void a_cancelled_receive_leaves_its_message_for_the_next() {
  Pair pair;
  int value = 5;
  int into[2] = {0, 0};
  auto cancelled = pair.second.receive(0, {1, 1}, &into[0], sizeof(int));
  pair.second.cancel(*cancelled, kGivenUp);
  CHECK(failed_as(cancelled, Failure::Kind::kTimeout) && cancelled->failure()->seconds == 1.5);
  pair.first.send(1, {1, 1}, &value, sizeof value);
  auto next = pair.second.receive(0, {1, 1}, &into[1], sizeof(int));
  pair.settle();
  CHECK(succeeded(next) && into[0] == 0 && into[1] == 5);
}

void a_cancelled_announcement_was_never_sent() {
  Pair pair;
  const Bytes large = pattern(kMiB, 1);
  const Bytes second = pattern(kMiB, 2);
  Bytes into(kMiB);
  auto cancelled = pair.first.send(1, {1, 1}, large.data(), large.size());
  pair.settle();
  pair.first.cancel(*cancelled, kGivenUp);
  pair.settle();
  auto send = pair.first.send(1, {1, 1}, second.data(), second.size());
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  pair.settle();
  CHECK(failed_as(cancelled, Failure::Kind::kTimeout) && succeeded(send) && succeeded(receive) && into == second);
  CHECK(pair.first.flushed());
}

// The buffers are freed right after the cancel: a sanitizer sees whoever still touches them.
void a_stream_cancelled_on_either_side_fails_both_and_the_channel_lives() {
  for (const bool sender_cancels : {true, false}) {
    Pair pair(LinkKind::kRing);
    auto large = std::make_unique<Bytes>(pattern(8 * kMiB, 1));
    auto into = std::make_unique<Bytes>(8 * kMiB);
    auto receive = pair.second.receive(0, {1, 1}, into->data(), into->size());
    auto send = pair.first.send(1, {1, 1}, large->data(), large->size());
    for (int round = 0; round < 5; ++round) CHECK(int{pair.first.pump()} + int{pair.second.pump()} > 0);
    CHECK(!send->is_over() && !receive->is_over());
    if (sender_cancels) {
      pair.first.cancel(*send, kGivenUp);
      large.reset();
    } else {
      pair.second.cancel(*receive, kGivenUp);
      into.reset();
    }
    pair.settle();
    CHECK(send->failure() != nullptr && receive->failure() != nullptr);
    CHECK(failed_as(sender_cancels ? receive : send, Failure::Kind::kFailed));
    int value = 3;
    int got = 0;
    pair.first.send(1, {1, 1}, &value, sizeof value);
    auto next = pair.second.receive(0, {1, 1}, &got, sizeof got);
    pair.settle();
    CHECK(succeeded(next) && got == 3 && pair.first.flushed() && pair.second.flushed());
  }
}

void a_cancelled_eager_send_that_was_half_written_keeps_the_frames_whole() {
  Links links(2, 1024);
  ChannelPair ends = links.connect(LinkKind::kRing, 0, 1);
  Messages first(0, 2);
  Messages second(1, 2);
  first.attach(1, std::move(ends.first));
  second.attach(0, std::move(ends.second));
  auto data = std::make_unique<Bytes>(pattern(kEagerBytes, 1));
  auto send = first.send(1, {1, 1}, data->data(), data->size());
  CHECK(!send->is_over());
  first.cancel(*send, kGivenUp);
  data.reset();
  int value = 4;
  int got = 0;
  first.send(1, {1, 2}, &value, sizeof value);
  auto receive = second.receive(0, {1, 2}, &got, sizeof got);
  while (!receive->is_over()) CHECK(int{first.pump()} + int{second.pump()} > 0);
  CHECK(got == 4);
}

void a_channel_that_closes_in_mid_message_fails_that_peer() {
  for (const size_t size : {size_t{1000}, 2 * kEagerBytes}) {
    Victim victim;
    Bytes into(size);
    int never = 0;
    auto receive = victim.messages.receive(1, {1, 1}, into.data(), size);
    const std::vector<int> sources{1};
    auto any = victim.messages.receive(kAnySource, {1, 7}, &never, sizeof never, &sources);
    const bool eager = size <= kEagerBytes;
    FrameHeader header{.kind = eager ? FrameKind::kEager : FrameKind::kAnnounce, .key = {1, 1}, .bytes = size};
    victim.write(header);
    if (!eager) victim.write({.kind = FrameKind::kData, .bytes = size});
    victim.write(into.data(), size / 2);
    victim.settle();
    CHECK(!receive->is_over());
    victim.raw.reset();
    victim.settle();
    CHECK(failed_as(receive, Failure::Kind::kLost) && receive->failure()->peer == 1);
    CHECK(failed_as(any, Failure::Kind::kLost));
    CHECK(failed_as(victim.messages.send(1, {1, 2}, &never, sizeof never), Failure::Kind::kLost));
    CHECK(failed_as(victim.messages.receive(1, {1, 2}, &never, sizeof never), Failure::Kind::kLost));
    victim.check_that_rank_2_is_unharmed();
  }
}

void what_arrived_before_the_end_is_still_received() {
  for (const bool told_first : {true, false}) {
    Victim victim;
    int value = 6;
    int got = 0;
    const FrameHeader header{.kind = FrameKind::kEager, .key = {1, 1}, .bytes = sizeof value};
    CHECK(victim.raw->write_some(&header, sizeof header) == sizeof header);
    CHECK(victim.raw->write_some(&value, sizeof value) == sizeof value);
    victim.raw.reset();
    Failure killed{};
    killed.kind = Failure::Kind::kLost;
    killed.pid = 77;
    if (told_first) victim.messages.fail_peer(1, killed);
    victim.settle();
    CHECK(succeeded(victim.messages.receive(1, {1, 1}, &got, sizeof got)) && got == 6);
    auto next = victim.messages.receive(1, {1, 1}, &got, sizeof got);
    CHECK(failed_as(next, Failure::Kind::kLost) && (next->failure()->pid == 77) == told_first);
  }
}

void fail_peer_fails_every_transfer_with_it() {
  Pair pair;
  const Bytes large = pattern(kMiB, 1);
  Bytes into(kMiB);
  auto announced = pair.first.send(1, {1, 1}, large.data(), large.size());
  auto posted = pair.first.receive(1, {1, 2}, into.data(), into.size());
  auto any = pair.first.receive(kAnySource, {1, 3}, into.data(), into.size());
  pair.settle();
  Failure killed{};
  killed.kind = Failure::Kind::kLost;
  killed.pid = 99;
  pair.first.fail_peer(1, killed);
  for (const auto& transfer : {announced, posted, any}) {
    CHECK(failed_as(transfer, Failure::Kind::kLost) && transfer->failure()->pid == 99);
  }
  CHECK(!pair.first.attached(1) && pair.first.flushed());
}

void any_source_survives_while_one_source_lives() {
  Victim victim;
  int got = 0;
  auto any = victim.messages.receive(kAnySource, {1, 1}, &got, sizeof got);
  victim.raw.reset();
  victim.settle();
  CHECK(!any->is_over());
  int value = 8;
  victim.friendly.send(0, {1, 1}, &value, sizeof value);
  victim.settle();
  CHECK(succeeded(any) && got == 8 && any->source == 2);
}

void what_is_sent_before_a_channel_is_attached_waits_for_it() {
  Links links(2);
  Messages first(0, 2);
  Messages second(1, 2);
  int value = 9;
  int got = 0;
  auto send = first.send(1, {1, 1}, &value, sizeof value);
  CHECK(!first.pump() && !send->is_over() && !first.flushed());
  ChannelPair ends = links.connect(LinkKind::kTcp, 0, 1);
  first.attach(1, std::move(ends.first));
  second.attach(0, std::move(ends.second));
  auto receive = second.receive(0, {1, 1}, &got, sizeof got);
  while (!receive->is_over()) second.pump();
  CHECK(succeeded(send) && got == 9);
}

// 80 MiB that nobody asked for: the receiver keeps 64 MiB, leaves the rest in the channel, and gets all of it later.
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
  CHECK(!sends.back()->is_over());
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
    Victim victim;
    int never = 0;
    auto receive = victim.messages.receive(1, {1, 1}, &never, sizeof never);
    victim.write(header);
    victim.settle();
    CHECK(is_lost(victim) && failed_as(receive, Failure::Kind::kLost));
    victim.check_that_rank_2_is_unharmed();
  }
}

void more_data_than_announced_and_a_number_used_twice_end_that_peer() {
  for (const bool twice : {true, false}) {
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
    CHECK(is_lost(victim) && failed_as(first, Failure::Kind::kLost) && failed_as(second, Failure::Kind::kLost));
    victim.check_that_rank_2_is_unharmed();
  }
}

void answers_to_unknown_messages_are_ignored() {
  Victim victim;
  for (const FrameKind kind : {FrameKind::kGrant, FrameKind::kRefuse, FrameKind::kWithdraw}) {
    victim.write({.kind = kind, .key = {1, 1}, .number = 12345, .bytes = ~uint64_t{0}});
  }
  victim.settle();
  CHECK(!is_lost(victim));
  victim.check_that_rank_2_is_unharmed();
}

// A header that is often valid, with fields that are often at an edge.
FrameHeader random_header(std::mt19937& random) {
  const uint64_t edges[] = {0, 1, 3, 100, kEagerBytes, kEagerBytes + 1, kBulkBytes, ~uint64_t{0}};
  FrameHeader header{.kind = static_cast<FrameKind>(random() % 7)};
  header.key = {random() % 2, random() % 2};
  header.number = random() % 4;
  header.bytes = edges[random() % std::size(edges)];
  if (random() % 50 == 0) header.magic = random();
  return header;
}

void random_frames_and_random_bytes_harm_nobody_else() {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
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
        if (random() % 8 == 0) victim.messages.cancel(*transfers[random() % transfers.size()], kGivenUp);
      }
    } catch (const ChannelClosed&) {
      // the victim has hung up on us
    }
    victim.raw.reset();
    victim.settle();
    CHECK(is_lost(victim));
    for (size_t index = 1; index < transfers.size(); index += 2) CHECK(transfers[index]->is_over());
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

void a_message_to_oneself_or_to_nobody_is_refused() {
  Messages messages(0, 2);
  int value = 0;
  for (const int peer : {0, 2, -5}) {
    bool refused = false;
    try {
      messages.send(peer, {1, 1}, &value, sizeof value);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_size_arrives_both_ways_over_every_link);
  RUN_TEST(random_schedules_deliver_every_message_in_order);
  RUN_TEST(large_sends_head_to_head_do_not_block_each_other);
  RUN_TEST(a_small_message_overtakes_a_large_one_that_streams);
  RUN_TEST(any_source_takes_the_named_sources_only);
  RUN_TEST(a_size_that_differs_fails_that_receive_and_nothing_else);
  RUN_TEST(a_cancelled_receive_leaves_its_message_for_the_next);
  RUN_TEST(a_cancelled_announcement_was_never_sent);
  RUN_TEST(a_stream_cancelled_on_either_side_fails_both_and_the_channel_lives);
  RUN_TEST(a_cancelled_eager_send_that_was_half_written_keeps_the_frames_whole);
  RUN_TEST(a_channel_that_closes_in_mid_message_fails_that_peer);
  RUN_TEST(what_arrived_before_the_end_is_still_received);
  RUN_TEST(fail_peer_fails_every_transfer_with_it);
  RUN_TEST(any_source_survives_while_one_source_lives);
  RUN_TEST(what_is_sent_before_a_channel_is_attached_waits_for_it);
  RUN_TEST(unexpected_messages_are_bounded_and_none_is_lost);
  RUN_TEST(frames_that_no_correct_peer_sends_end_that_peer_only);
  RUN_TEST(more_data_than_announced_and_a_number_used_twice_end_that_peer);
  RUN_TEST(answers_to_unknown_messages_are_ignored);
  RUN_TEST(random_frames_and_random_bytes_harm_nobody_else);
  RUN_TEST(a_flood_of_empty_messages_is_bounded);
  RUN_TEST(a_message_to_oneself_or_to_nobody_is_refused);
}
