// Messages between ranks: every size, in order, over every link, from any source, none held up by another.
#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "tests/check.hpp"
#include "tests/links.hpp"
#include "tests/messages/messages_fixture.hpp"

namespace procgroup::testing {
namespace {

constexpr size_t kSizes[] = {0,    1,        8,         4096,      kEagerBytes - 1, kEagerBytes,    kEagerBytes + 1,
                             8152, 8 * 1024, 60 * 1000, 70 * 1000, kBulkBytes,      kBulkBytes + 1, kMiB + 17};

struct Scheduled {
  int from;
  int to;
  uint64_t tag;
  size_t size;
  unsigned seed;
};

std::vector<Scheduled> random_schedule(int ranks, int messages, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Scheduled> schedule;
  for (int index = 0; index < messages; ++index) {
    const int from = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const int to = (from + 1 + static_cast<int>(random() % static_cast<unsigned>(ranks - 1))) % ranks;
    schedule.push_back({from, to, random() % 3, kSizes[random() % std::size(kSizes)], static_cast<unsigned>(random())});
  }
  return schedule;
}

// The receives of one rank in random order, but in the sent order under each key: that order is promised.
std::vector<Scheduled> shuffled_receives(const std::vector<Scheduled>& schedule, int rank, unsigned seed) {
  std::vector<Scheduled> mine;
  std::copy_if(schedule.begin(), schedule.end(), std::back_inserter(mine),
               [&](const Scheduled& scheduled) { return scheduled.to == rank; });
  std::vector<Scheduled> order = mine;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::map<std::pair<int, uint64_t>, size_t> next;
  for (Scheduled& slot : order) {
    size_t& position = next[{slot.from, slot.tag}];
    while (mine[position].from != slot.from || mine[position].tag != slot.tag) ++position;
    slot = mine[position++];
  }
  return order;
}

void run_schedule(const std::vector<Scheduled>& schedule, unsigned seed, int rank, Messages& messages,
                  Doorbell& doorbell) {
  std::vector<std::pair<TransferPtr, Bytes>> sends;
  std::vector<std::tuple<TransferPtr, Bytes, Scheduled>> receives;
  for (const Scheduled& scheduled : schedule) {
    if (scheduled.from != rank) continue;
    sends.emplace_back(nullptr, pattern(scheduled.size, scheduled.seed));
    sends.back().first = messages.send(scheduled.to, {5, scheduled.tag}, sends.back().second.data(), scheduled.size);
  }
  for (const Scheduled& scheduled : shuffled_receives(schedule, rank, seed + static_cast<unsigned>(rank))) {
    receives.emplace_back(nullptr, Bytes(scheduled.size), scheduled);
    std::get<0>(receives.back()) =
        messages.receive(scheduled.from, {5, scheduled.tag}, std::get<1>(receives.back()).data(), scheduled.size);
    if (scheduled.seed % 3 == 0) messages.pump();
  }
  pump_until(messages, doorbell, [&] {
    return std::all_of(sends.begin(), sends.end(), [](const auto& send) { return send.first->is_completed(); }) &&
           std::all_of(receives.begin(), receives.end(),
                       [](const auto& entry) { return std::get<0>(entry)->is_completed(); });
  });
  for (const auto& [send, data] : sends) CHECK(succeeded(send));
  for (const auto& [receive, data, scheduled] : receives) {
    CASE("%zu bytes from rank %d, tag %zu", scheduled.size, scheduled.from, scheduled.tag);
    CHECK(succeeded(receive));
    CHECK_EQUAL(data, pattern(scheduled.size, scheduled.seed));
  }
}

void every_size_arrives_both_ways_over_every_link() {
  for (const LinkKind kind : kLinkKinds) {
    run_ranks(2, kind, 64 * 1024, [](int rank, Messages& messages, Doorbell& doorbell) {
      for (const size_t size : kSizes) {
        CASE("%zu bytes", size);
        const Bytes sent = pattern(size, static_cast<unsigned>(rank));
        Bytes received(size);
        auto send = messages.send(1 - rank, {1, size}, sent.data(), size);
        auto receive = messages.receive(1 - rank, {1, size}, received.data(), size);
        pump_until(messages, doorbell, [&] { return send->is_completed() && receive->is_completed(); });
        CHECK(succeeded(send) && succeeded(receive));
        CHECK(receive->source == 1 - rank && receive->bytes == size);
        CHECK_EQUAL(received, pattern(size, static_cast<unsigned>(1 - rank)));
      }
    });
  }
}

void random_schedules_deliver_every_message_in_order() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int ranks : {2, 3, 4, 7}) {
      const unsigned seed = test_seed(static_cast<unsigned>(ranks) * 10 + static_cast<unsigned>(kind));
      CASE("seed %u", seed);
      const std::vector<Scheduled> schedule = random_schedule(ranks, 60, seed);
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
      pump_until(messages, doorbell, [&] { return send->is_completed() && receive->is_completed(); });
      CHECK_EQUAL(received, pattern(received.size(), static_cast<unsigned>(1 - rank)));
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
  while (!small->is_completed()) CHECK(int{pair.first.pump()} + int{pair.second.pump()} > 0);
  CHECK(received == 7 && !stream->is_completed());
  pair.settle();
  CHECK(succeeded(send) && succeeded(stream) && into == large);
  CHECK(send->moved() >= large.size() && stream->moved() == large.size());
}

void any_source_takes_the_named_sources_only() {
  run_ranks(3, LinkKind::kUnixSocket, 0, [](int rank, Messages& messages, Doorbell& doorbell) {
    if (rank > 0) {
      auto send = messages.send(0, {1, 1}, &rank, sizeof rank);
      return pump_until(messages, doorbell, [&] { return send->is_completed(); });
    }
    const std::vector<int> only_second{2};
    const std::vector<int> both{1, 2};
    int from_second = -1;
    int other = -1;
    auto first_receive = messages.receive(kAnySource, {1, 1}, &from_second, sizeof(int), &only_second);
    auto second_receive = messages.receive(kAnySource, {1, 1}, &other, sizeof(int), &both);
    pump_until(messages, doorbell, [&] { return first_receive->is_completed() && second_receive->is_completed(); });
    CHECK(from_second == 2 && first_receive->source == 2);
    CHECK(other == 1 && second_receive->source == 1);
  });
}

void what_is_sent_before_a_channel_is_attached_waits_for_it() {
  Links links(2);
  Messages first(0, 2);
  Messages second(1, 2);
  int value = 9;
  int got = 0;
  auto send = first.send(1, {1, 1}, &value, sizeof value);
  CHECK(!first.pump() && !send->is_completed() && !first.flushed());
  ChannelPair ends = links.connect(LinkKind::kTcp, 0, 1);
  first.attach(1, std::move(ends.first));
  second.attach(0, std::move(ends.second));
  auto receive = second.receive(0, {1, 1}, &got, sizeof got);
  while (!receive->is_completed()) second.pump();
  CHECK(succeeded(send) && got == 9);
}

void a_message_to_oneself_or_to_nobody_is_refused() {
  Messages messages(0, 2);
  int value = 0;
  for (const int peer : {0, 2, -5}) {
    CASE("peer %d", peer);
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
  RUN_TEST(what_is_sent_before_a_channel_is_attached_waits_for_it);
  RUN_TEST(a_message_to_oneself_or_to_nobody_is_refused);
}
