// Schedules by messages alone, and those that use shared memory inside hosts: every rank ends with what the operation
// says, for many numbers of ranks, layouts of hosts and lengths, in random orders.
#include "schedules/message_schedules.hpp"

#include <functional>
#include <numeric>
#include <string>

#include "schedules/hierarchical_schedules.hpp"
#include "tests/schedules/schedule_simulation.hpp"

namespace procgroup {
namespace {

using testing::Elements;
using testing::Simulation;

constexpr size_t kElement = sizeof(uint32_t);
constexpr size_t kSlotBytes = 256;
constexpr uint32_t kUntouched = 0x5a5a5a5a;

// With `in_order` the order of a reduction matters: by messages alone it is that of the ranks.
uint32_t in_order(uint32_t left, uint32_t right) { return left * 31 + right; }

uint32_t value(int from, int to, size_t index) {
  return static_cast<uint32_t>(from + 1) * 2'654'435'761u ^
         (static_cast<uint32_t>(to) * 40'503u + static_cast<uint32_t>(index));
}

struct Case {
  OpKind op;
  std::vector<int> hosts;
  size_t count;
  bool by_host;  // else by messages alone
  int root = -1;
  unsigned seed = 0;
  size_t widening = 1;

  int size() const { return static_cast<int>(hosts.size()); }
  bool has_inputs() const { return has_input_blocks(op); }
  bool has_outputs() const { return op == OpKind::kGather || op == OpKind::kAllGather || op == OpKind::kAllToAll; }
  // Elements that one rank has for another, as the table of an operation has them: with a root for all pairs.
  size_t moved(int from, int to) const {
    if (op == OpKind::kAllGather) return static_cast<size_t>(from * 5 % 4) * count / 3;
    if (op == OpKind::kReduceScatter) return static_cast<size_t>(to * 3 % 4) * count / 3;
    if (op == OpKind::kAllToAll) return static_cast<size_t>((from * 5 + to * 3) % 4) * count / 3;
    return count;
  }
  bool gives(int rank) const { return op != OpKind::kScatter || rank == root; }
  bool takes(int rank) const {
    return op == OpKind::kBroadcast || procgroup::takes(op, rank, root);  // the root of a broadcast copies to itself
  }
};

Elements block(const Case& one, int from, int to) {
  Elements elements(one.moved(from, to));
  for (size_t index = 0; index < elements.size(); ++index) elements[index] = value(from, to, index);
  return elements;
}

Elements reduced(const Case& one, const Simulation& world, int to, int sources) {
  Elements sum = block(one, 0, to);
  for (int from = 1; from < sources; ++from) {
    const Elements theirs = block(one, from, to);
    for (size_t index = 0; index < sum.size(); ++index) sum[index] = world.combine(sum[index], theirs[index]);
  }
  return sum;
}

void make_schedule(const Case& one, const BlockTable& table, int rank, Simulation& world) {
  const ScheduleRequest request{.op = one.op,
                                .rank = rank,
                                .size = one.size(),
                                .root = one.root,
                                .element_bytes = kElement,
                                .bytes = one.count * kElement,
                                .blocks = table,
                                .chunk_bytes = kSlotBytes,
                                .segment_bytes = (one.seed % 3 == 0   ? 1
                                                  : one.seed % 3 == 1 ? 7
                                                                      : 1000) *
                                                 kElement,
                                .earlier_chunks = one.seed % 5,
                                .widening = one.widening,
                                .topology = world[rank].topology};
  (one.by_host ? schedule_hierarchical : schedule_messages)(request, world[rank].schedule);
}

void check_outputs(const Case& one, Simulation& world, int rank) {
  const std::vector<Elements>& outputs = world[rank].outputs;
  const bool reduces_all = reduces(one.op) && one.op != OpKind::kReduceScatter;
  for (size_t index = 0; one.takes(rank) && index < outputs.size(); ++index) {
    const int from = one.has_outputs() ? static_cast<int>(index) : std::max(one.root, 0);
    CASE("rank %d, output %zu", rank, index);
    if (reduces(one.op))
      CHECK_EQUAL(outputs[index], reduced(one, world, reduces_all ? 0 : rank, sources_of(one.op, rank, one.size())));
    else
      CHECK_EQUAL(outputs[index], block(one, from, one.has_inputs() ? rank : 0));
  }
}

void play(const Case& one) {
  std::string hosts;
  for (const int host : one.hosts) hosts.append(" ").append(std::to_string(host));
  CASE("%s by %s, hosts%s, %zu elements, root %d, seed %u, widening %zu", op_name(one.op),
       one.by_host ? "schedule_hierarchical" : "schedule_messages", hosts.c_str(), one.count, one.root, one.seed,
       one.widening);
  Simulation world(one.size(), kSlotBytes, one.hosts);
  if (!one.by_host) world.combine = in_order;
  BlockTable table;
  table.reset(one.size(), 0);
  for (int from = 0; from < one.size(); ++from)
    for (int to = 0; to < one.size(); ++to) table.between(from, to) = one.moved(from, to) * kElement;
  for (int rank = 0; rank < one.size(); ++rank) {
    for (int to = 0; to < (one.has_inputs() ? one.size() : 1); ++to) {
      const int target = one.op == OpKind::kAllGather || one.op == OpKind::kGather ? 0 : to;
      world[rank].inputs.push_back(one.gives(rank) ? block(one, rank, target) : Elements());
    }
    for (int from = 0; from < (one.has_outputs() ? one.size() : 1); ++from)
      world[rank].outputs.emplace_back(one.takes(rank) ? one.moved(from, rank) : 0, kUntouched);
    make_schedule(one, table, rank, world);
  }
  world.run(one.seed);
  for (int rank = 0; rank < one.size(); ++rank) check_outputs(one, world, rank);
}

constexpr OpKind kOperations[] = {OpKind::kAllReduce, OpKind::kReduce,  OpKind::kBroadcast,     OpKind::kGather,
                                  OpKind::kAllGather, OpKind::kScatter, OpKind::kReduceScatter, OpKind::kAllToAll,
                                  OpKind::kScan,      OpKind::kExscan};

bool is_rooted(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kBroadcast || op == OpKind::kGather || op == OpKind::kScatter;
}

void play_all(const std::vector<int>& hosts, const std::vector<size_t>& counts, bool by_host) {
  const int size = static_cast<int>(hosts.size());
  unsigned seed = static_cast<unsigned>(size);
  for (const OpKind op : kOperations) {
    if (by_host && !has_hierarchical_schedule(op)) continue;
    for (const size_t count : counts) {
      const int step = std::max(1, size / 4);
      for (int root = is_rooted(op) ? 0 : -1; root < (is_rooted(op) ? size : 0); root += step)
        for (size_t widening = 1; widening <= (by_host && reduces(op) ? 2 : 1); ++widening)
          play({.op = op,
                .hosts = hosts,
                .count = count,
                .by_host = by_host,
                .root = root,
                .seed = ++seed,
                .widening = widening});
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
    play_all(apart(size), {0, 1, ranks - 1, ranks, ranks + 1, 97, 320}, false);
  }
}

void hosts_of_any_layout_give_every_result() {
  const std::vector<std::vector<int>> layouts = {{0, 0, 1, 1},    {0, 1, 0, 1},          {0, 0, 0, 1}, {0, 1, 1, 1},
                                                 {0, 0, 1, 2, 2}, {0, 1, 0, 2, 1, 1, 0}, {0, 1, 2}};
  for (const std::vector<int>& hosts : layouts) play_all(hosts, {0, 1, 3, hosts.size(), 61, 64, 65, 200, 333}, true);
}

void up_to_64_ranks_give_every_result() {
  std::mt19937 random(7);
  for (const int size : {12, 33, 64}) {
    play_all(apart(size), {100}, false);
    std::vector<int> hosts(static_cast<size_t>(size));
    for (size_t rank = 0; rank < hosts.size(); ++rank) hosts[rank] = static_cast<int>(rank / 8);
    play_all(hosts, {1, 100}, true);
    for (int& host : hosts) host = static_cast<int>(random() % 5);
    play_all(hosts, {100}, true);
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
      .op = op, .hosts = hosts, .count = count, .by_host = true, .root = root, .seed = 2, .widening = widening};
  Simulation world(one.size(), kSlotBytes, hosts);
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
