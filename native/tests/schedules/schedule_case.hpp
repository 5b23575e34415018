// One operation of all ranks by a schedule: the ranks' blocks, and the result of every rank.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tests/schedules/schedule_simulation.hpp"

namespace procgroup {

using testing::Elements;
using testing::Simulation;

inline constexpr size_t kElement = sizeof(uint32_t);
inline constexpr uint32_t kUntouched = 0x5a5a5a5a;

inline constexpr uint32_t kReused = 0xdeadbeef;

// Which schedule: by messages alone, by hosts, of blocks through slots, by reading in place; and those of whole arrays
// through slots.
enum class By { kMessages, kHosts, kBlocks, kReading, kWhole, kScattered, kExchanged };

// With `in_order` the order of a reduction matters: by messages alone it is that of the ranks.
inline uint32_t in_order(uint32_t left, uint32_t right) { return left * 31 + right; }

inline uint32_t value(int from, int to, size_t index) {
  return static_cast<uint32_t>(from + 1) * 2'654'435'761u ^
         (static_cast<uint32_t>(to) * 40'503u + static_cast<uint32_t>(index));
}

struct Case {
  OpKind op;
  std::vector<int> hosts;
  size_t count;
  By by;
  int root = -1;
  unsigned seed = 0;
  size_t widening = 1;
  size_t slot_bytes = 256;
  bool in_place = false;

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
    const bool copies_to_itself = op == OpKind::kBroadcast && (by == By::kMessages || by == By::kHosts);
    return copies_to_itself || procgroup::takes(op, rank, root);
  }
};

inline Elements block(const Case& one, int from, int to) {
  Elements elements(one.moved(from, to));
  for (size_t index = 0; index < elements.size(); ++index) elements[index] = value(from, to, index);
  return elements;
}

inline Elements reduced(const Case& one, const Simulation& world, int to, int sources) {
  Elements sum = block(one, 0, to);
  for (int from = 1; from < sources; ++from) {
    const Elements theirs = block(one, from, to);
    for (size_t index = 0; index < sum.size(); ++index) sum[index] = world.combine(sum[index], theirs[index]);
  }
  return sum;
}

inline void make_schedule(const Case& one, const BlockTable& table, int rank, Simulation& world) {
  const ScheduleRequest request{.op = one.op,
                                .rank = rank,
                                .size = one.size(),
                                .root = one.root,
                                .element_bytes = kElement,
                                .bytes = one.count * kElement,
                                .blocks = table,
                                .chunk_bytes = one.slot_bytes,
                                .segment_bytes = (one.seed % 3 == 0   ? 1
                                                  : one.seed % 3 == 1 ? 7
                                                                      : 1000) *
                                                 kElement,
                                .earlier_chunks = one.seed % 5,
                                .widening = one.widening,
                                .topology = world[rank].topology};
  constexpr void (*kMakers[])(const ScheduleRequest&, Schedule&) = {schedule_messages,
                                                                    schedule_hierarchical,
                                                                    schedule_blocks,
                                                                    schedule_reading,
                                                                    schedule_slots,
                                                                    schedule_all_reduce_scattered,
                                                                    schedule_all_reduce_exchanged};
  kMakers[static_cast<size_t>(one.by)](request, world[rank].schedule);
}

inline void check_outputs(const Case& one, Simulation& world, int rank) {
  const std::vector<Elements>& outputs = world[rank].outputs;
  if (one.in_place && !one.takes(rank)) CHECK_EQUAL(outputs[0], block(one, rank, 0));
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

inline void play(const Case& one) {
  std::string hosts;
  for (const int host : one.hosts) hosts.append(" ").append(std::to_string(host));
  constexpr const char* kNames[] = {"messages", "hosts", "blocks", "reading", "whole", "scattered", "exchanged"};
  CASE("%s by %s, hosts%s, %zu elements, root %d, seed %u, widening %zu", op_name(one.op),
       kNames[static_cast<size_t>(one.by)], hosts.c_str(), one.count, one.root, one.seed, one.widening);
  Simulation world(one.size(), one.slot_bytes, one.hosts);
  if (one.by == By::kMessages || one.by >= By::kWhole) world.combine = in_order;
  world.in_place = one.in_place;
  world.input_blocks = one.by == By::kReading && one.has_inputs();
  std::vector<std::vector<Elements>> results(one.hosts.size());
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
    if (one.in_place) world[rank].outputs = world[rank].inputs;
    make_schedule(one, table, rank, world);
    if (one.by == By::kReading)  // a rank's user takes its results and reuses its arrays as soon as its schedule ends
      world[rank].when_done = [&taken = results[static_cast<size_t>(rank)]](testing::SimulatedRank& mine) {
        if (taken.empty()) taken = mine.outputs;
        for (std::vector<Elements>* arrays : {&mine.inputs, &mine.outputs})
          for (Elements& array : *arrays) array.assign(array.size(), kReused);
      };
  }
  world.run(one.seed);
  for (int rank = 0; rank < one.size(); ++rank)
    if (const std::vector<Elements>& taken = results[static_cast<size_t>(rank)]; !taken.empty())
      world[rank].outputs = taken;
  for (int rank = 0; rank < one.size(); ++rank) check_outputs(one, world, rank);
}

}  // namespace procgroup
