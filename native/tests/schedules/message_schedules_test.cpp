// Schedules by messages alone, and those that use shared memory inside hosts: every rank ends with what the operation
// says, for many numbers of ranks, layouts of hosts and lengths, in random orders.
#include <numeric>

#include "tests/schedules/schedule_case.hpp"

namespace procgroup {
namespace {

constexpr OpKind kOperations[] = {OpKind::kAllReduce, OpKind::kReduce,  OpKind::kBroadcast,     OpKind::kGather,
                                  OpKind::kAllGather, OpKind::kScatter, OpKind::kReduceScatter, OpKind::kAllToAll,
                                  OpKind::kScan,      OpKind::kExscan};

bool is_rooted(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kBroadcast || op == OpKind::kGather || op == OpKind::kScatter;
}

void play_all(const std::vector<int>& hosts, const std::vector<size_t>& counts, By by) {
  const int size = static_cast<int>(hosts.size());
  unsigned seed = static_cast<unsigned>(size);
  for (const OpKind op : kOperations) {
    if (by == By::kHosts && !has_hierarchical_schedule(op)) continue;
    for (const size_t count : counts) {
      const int step = std::max(1, size / 4);
      for (int root = is_rooted(op) ? 0 : -1; root < (is_rooted(op) ? size : 0); root += step)
        for (size_t widening = 1; widening <= (by == By::kHosts && reduces(op) ? 2 : 1); ++widening)
          play(
              {.op = op, .hosts = hosts, .count = count, .by = by, .root = root, .seed = ++seed, .widening = widening});
    }
  }
}

std::vector<int> apart(int size) {
  std::vector<int> hosts(static_cast<size_t>(size));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

void messages_alone_give_every_result_in_the_order_of_ranks() {
  for (const int size : {1, 2, 3, 4, 5, 7}) {
    const size_t ranks = static_cast<size_t>(size);
    play_all(apart(size), {0, 1, ranks - 1, ranks, ranks + 1, 97, 320}, By::kMessages);
  }
}

void hosts_of_any_layout_give_every_result() {
  const std::vector<std::vector<int>> layouts = {{0, 0, 1, 1},    {0, 1, 0, 1},          {0, 0, 0, 1}, {0, 1, 1, 1},
                                                 {0, 0, 1, 2, 2}, {0, 1, 0, 2, 1, 1, 0}, {0, 1, 2}};
  for (const std::vector<int>& hosts : layouts)
    play_all(hosts, {0, 1, 3, hosts.size(), 61, 64, 65, 200, 333}, By::kHosts);
}

void up_to_64_ranks_give_every_result() {
  std::mt19937 random(7);
  for (const int size : {12, 33, 64}) {
    play_all(apart(size), {100}, By::kMessages);
    std::vector<int> hosts(static_cast<size_t>(size));
    for (size_t rank = 0; rank < hosts.size(); ++rank) hosts[rank] = static_cast<int>(rank / 8);
    play_all(hosts, {1, 100}, By::kHosts);
    for (int& host : hosts) host = static_cast<int>(random() % 5);
    play_all(hosts, {100}, By::kHosts);
  }
}

// Bytes that the ranks of one host send to others.
size_t sent_by(Simulation& world, int host) {
  size_t sent = 0;
  for (int rank = 0; rank < world.size(); ++rank)
    for (const Step& step : world[rank].schedule.steps)
      if (step.kind == Step::Kind::kSend && world[rank].topology.own_host() == host) sent += step.bytes;
  return sent;
}

size_t sent_by_host(OpKind op, const std::vector<int>& hosts, size_t count, int root = -1, size_t widening = 1) {
  const Case one{
      .op = op, .hosts = hosts, .count = count, .by = By::kHosts, .root = root, .seed = 2, .widening = widening};
  Simulation world(one.size(), one.slot_bytes, hosts);
  BlockTable table;
  table.reset(one.size(), count * kElement);
  for (int rank = 0; rank < one.size(); ++rank) make_schedule(one, table, rank, world);
  return sent_by(world, 0);
}

void a_host_sends_each_byte_once() {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1, 1}, {0, 1, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1}}) {
    CASE("hosts %d %d %d %d", hosts[0], hosts[1], hosts[2], hosts[3]);
    const size_t mine = static_cast<size_t>(std::ranges::count(hosts, 0));
    const size_t others = hosts.size() - mine;
    CHECK_EQUAL(sent_by_host(OpKind::kAllReduce, hosts, 240),
                240 * kElement);  // half of the partial sums, half of the sums
    CHECK_EQUAL(sent_by_host(OpKind::kBroadcast, hosts, 240, 0), 240 * kElement);
    CHECK_EQUAL(sent_by_host(OpKind::kAllGather, hosts, 240), mine * 240 * kElement);
    CHECK_EQUAL(sent_by_host(OpKind::kReduceScatter, hosts, 240), others * 240 * kElement);
    CHECK_EQUAL(sent_by_host(OpKind::kAllToAll, hosts, 240), mine * others * 240 * kElement);
  }
}

void partial_results_of_twice_the_width_cost_half_as_much_again() {
  CHECK_EQUAL(sent_by_host(OpKind::kAllReduce, {0, 0, 1, 1}, 240, -1, 2), 360 * kElement);
}

void messages_alone_send_no_more_than_a_ring() {
  for (const int size : {2, 3, 4, 7}) {
    CASE("%d ranks", size);
    const size_t blocks = static_cast<size_t>(size);
    const size_t bytes = blocks * 100 * kElement;
    Schedule schedule;
    schedule_messages({.op = OpKind::kAllReduce,
                       .rank = 1,
                       .size = size,
                       .element_bytes = kElement,
                       .bytes = bytes,
                       .segment_bytes = 9 * kElement},
                      schedule);
    size_t sent = 0;
    for (const Step& step : schedule.steps) sent += step.kind == Step::Kind::kSend ? step.bytes : 0;
    CHECK_EQUAL(sent, 2 * (blocks - 1) * 100 * kElement);
    CHECK_EQUAL(schedule.scratch_bytes, 2 * blocks * 9 * kElement);
  }
}

}  // namespace
}  // namespace procgroup

int main() {
  using namespace procgroup;
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(messages_alone_give_every_result_in_the_order_of_ranks);
  RUN_TEST(hosts_of_any_layout_give_every_result);
  RUN_TEST(up_to_64_ranks_give_every_result);
  RUN_TEST(a_host_sends_each_byte_once);
  RUN_TEST(partial_results_of_twice_the_width_cost_half_as_much_again);
  RUN_TEST(messages_alone_send_no_more_than_a_ring);
}
