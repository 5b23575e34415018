// Runs the schedules of all ranks over simulated memory and messages, one step of a random rank at a time: an order in
// which a schedule would read too early, or overwrite too early, is found as wrong elements, and one that cannot go on
// as a deadlock.
//
// It is as strict as a transport may be: a message moves only when both sides have issued it, few transfers run at a
// time on a rank, and what is received may be written at any time between. Slots belong to the ranks of one host.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "schedules/schedule.hpp"
#include "schedules/topology.hpp"
#include "tests/check.hpp"
#include "transport/group_memory.hpp"

namespace procgroup::testing {

using Elements = std::vector<uint32_t>;

inline constexpr size_t kFewTransfers = 2;

struct SimulatedRank {
  struct Memory {
    uint32_t* begin = nullptr;
    size_t bytes = 0;

    bool overlaps(const Memory& other) const {
      const auto* end = begin + bytes / sizeof(uint32_t);
      const auto* other_end = other.begin + other.bytes / sizeof(uint32_t);
      return bytes > 0 && other.bytes > 0 && begin < other_end && other.begin < end;
    }
  };
  struct Transfer {
    bool receives;
    int peer;
    Memory memory;
  };

  std::vector<Elements> inputs;  // blocks, or one array
  std::vector<Elements> outputs;
  std::vector<Elements> slots;
  Schedule schedule;
  Topology topology;
  Elements scratch;
  std::vector<Transfer> running;
  uint64_t progress = 0;
  size_t step = 0;
  std::function<void(SimulatedRank&)> when_done = [](SimulatedRank&) {};

  bool is_done() const { return step == schedule.steps.size() && running.empty(); }
};

class Simulation {
 public:
  // By default all ranks share memory; `hosts` as in Topology.
  Simulation(int size, size_t slot_bytes, std::vector<int> hosts = {}) : ranks(static_cast<size_t>(size)) {
    hosts.resize(ranks.size());
    for (int rank = 0; rank < size; ++rank) {
      (*this)[rank].slots.assign(kSlots, Elements(slot_bytes / sizeof(uint32_t), 0xdeadbeef));
      (*this)[rank].topology = Topology(hosts, rank);
    }
  }

  SimulatedRank& operator[](int rank) { return ranks[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }

  void run(unsigned seed) {
    std::mt19937 random(seed);
    for (SimulatedRank& rank : ranks) rank.scratch.assign(rank.schedule.scratch_bytes / sizeof(uint32_t), 0xdeadbeef);
    for (;;) {
      std::vector<int> able;
      bool all_done = true;
      for (int rank = 0; rank < size(); ++rank) {
        all_done = all_done && (*this)[rank].is_done();
        if (can_step(rank) || can_deliver(rank)) able.push_back(rank);
      }
      if (all_done) break;
      if (able.empty()) print_steps();
      CHECK(!able.empty());  // else a deadlock
      const int chosen = able[random() % able.size()];
      if (can_step(chosen) && (!can_deliver(chosen) || random() % 2 == 0))
        run_step(chosen);
      else
        deliver(chosen);
      if ((*this)[chosen].is_done()) (*this)[chosen].when_done((*this)[chosen]);
    }
    for (const SimulatedRank& rank : ranks) {
      const SimulatedRank& leader = ranks[static_cast<size_t>(rank.topology.local_ranks()[0])];
      CHECK(rank.progress == rank.schedule.published && rank.schedule.published == leader.schedule.published);
      CHECK(rank.schedule.chunks == leader.schedule.chunks);
    }
  }

  std::vector<SimulatedRank> ranks;
  bool in_place = false;      // whole arrays: the input is the output
  bool input_blocks = false;  // a rank has an input block for each other
  // Of a reduction, in the order of the sources.
  uint32_t (*combine)(uint32_t left, uint32_t right) = [](uint32_t left, uint32_t right) { return left + right; };

 private:
  using Kind = Step::Kind;
  using Memory = SimulatedRank::Memory;

  // The rank that another one numbers so among those of its host.
  int local(int rank, int index) { return (*this)[rank].topology.local_ranks()[static_cast<size_t>(index)]; }

  void print_steps() {
    for (int rank = 0; rank < size(); ++rank) {
      const SimulatedRank& mine = (*this)[rank];
      std::fprintf(stderr, "\n  rank %d: step %zu of %zu, %zu transfers run, progress %zu", rank, mine.step,
                   mine.schedule.steps.size(), mine.running.size(), static_cast<size_t>(mine.progress));
    }
  }

  bool can_step(int rank) {
    SimulatedRank& mine = (*this)[rank];
    if (mine.step == mine.schedule.steps.size()) return false;
    const Step& step = mine.schedule.steps[mine.step];
    if (step.kind == Kind::kPublish) return true;
    if (step.kind == Kind::kAwait) {
      const auto reached = [&](int other) { return (*this)[other].progress >= step.value; };
      if (step.rank != kEveryone) return reached(local(rank, step.rank));
      return std::ranges::all_of(mine.topology.local_ranks(), reached);
    }
    const bool transfers = step.kind == Kind::kSend || step.kind == Kind::kReceive;
    if (transfers && mine.running.size() >= kFewTransfers) return false;
    return std::ranges::none_of(mine.running, [&](const SimulatedRank::Transfer& transfer) {
      const size_t bytes = mine.schedule.written_bytes(step);
      if (step.kind != Kind::kSend && transfer.memory.overlaps(at(rank, step.to, bytes))) return true;
      return transfer.receives && reads(rank, step, transfer.memory);
    });
  }

  bool reads(int rank, const Step& step, const Memory& memory) {
    switch (step.kind) {
      case Kind::kReceive:
        return false;
      case Kind::kReduce:
      case Kind::kReadReduce: {
        const size_t bytes = (*this)[rank].schedule.read_bytes(step);
        Place from = step.from;
        for (from.rank = 0; from.rank < step.sources; ++from.rank)
          if (memory.overlaps(at(rank, from.rank == step.own_source ? step.own : from, bytes))) return true;
        return false;
      }
      default:
        return memory.overlaps(at(rank, step.from, step.bytes));
    }
  }

  Memory at(int rank, const Place& place, size_t bytes) {
    CHECK(place.offset % sizeof(uint32_t) == 0 && bytes % sizeof(uint32_t) == 0);
    SimulatedRank& mine = (*this)[rank];
    Elements* array = nullptr;
    size_t offset = place.offset;
    switch (place.kind) {
      case Place::Kind::kInput:
        array = &(in_place ? mine.outputs : mine.inputs).at(static_cast<size_t>(place.rank));
        break;
      case Place::Kind::kOutput:
        array = &mine.outputs.at(static_cast<size_t>(place.rank));
        break;
      case Place::Kind::kScratch:
        array = &mine.scratch;
        offset += static_cast<size_t>(place.rank) * mine.schedule.source_stride;
        break;
      case Place::Kind::kSlot:
        array = &(*this)[local(rank, place.rank)].slots.at(static_cast<size_t>(place.slot));
        break;
      case Place::Kind::kPeerInput:
      case Place::Kind::kPeerOutput: {
        SimulatedRank& owner = (*this)[local(rank, place.rank)];
        const bool input = place.kind == Place::Kind::kPeerInput;
        const size_t block = static_cast<size_t>(input && input_blocks ? rank : 0);
        array = &(input && !in_place ? owner.inputs : owner.outputs).at(block);
      }
    }
    CHECK(offset + bytes <= array->size() * sizeof(uint32_t));
    return {array->data() + offset / sizeof(uint32_t), bytes};
  }

  void run_step(int rank) {
    SimulatedRank& mine = (*this)[rank];
    CASE("rank %d, step %zu", rank, mine.step);
    const Step& step = mine.schedule.steps[mine.step++];
    switch (step.kind) {
      case Kind::kCopy:
      case Kind::kRead:
        std::memmove(at(rank, step.to, step.bytes).begin, at(rank, step.from, step.bytes).begin, step.bytes);
        break;
      case Kind::kReduce:
      case Kind::kReadReduce:
        reduce(rank, step);
        break;
      case Kind::kPublish:
        CHECK(step.value > mine.progress);
        mine.progress = step.value;
        break;
      case Kind::kAwait:
        break;
      case Kind::kSend:
        mine.running.push_back({false, step.rank, at(rank, step.from, step.bytes)});
        break;
      case Kind::kReceive:
        mine.running.push_back({true, step.rank, at(rank, step.to, step.bytes)});
        break;
    }
  }

  // A partial result is an element, repeated over its width.
  void reduce(int rank, const Step& step) {
    const Schedule& schedule = (*this)[rank].schedule;
    const size_t read_width = schedule.read_bytes(step) / step.bytes;
    const size_t written_width = schedule.written_bytes(step) / step.bytes;
    for (size_t index = 0; index < step.bytes / sizeof(uint32_t); ++index) {
      uint32_t sum = 0;
      Place from = step.from;
      for (from.rank = 0; from.rank < step.sources; ++from.rank) {
        const Place& place = from.rank == step.own_source ? step.own : from;
        const uint32_t* one = at(rank, place, step.bytes * read_width).begin + index * read_width;
        CHECK(std::all_of(one, one + read_width, [one](uint32_t repeated) { return repeated == *one; }));
        sum = from.rank == 0 ? *one : combine(sum, *one);
      }
      uint32_t* to = at(rank, step.to, step.bytes * written_width).begin + index * written_width;
      std::fill(to, to + written_width, sum);
      if (step.has_also) at(rank, step.also, step.bytes).begin[index] = sum;
    }
  }

  // The first receive of a pair gets its first send.
  std::vector<SimulatedRank::Transfer>::iterator first_of(int rank, bool receives, int peer) {
    return std::ranges::find_if((*this)[rank].running, [&](const SimulatedRank::Transfer& transfer) {
      return transfer.receives == receives && transfer.peer == peer;
    });
  }
  int deliverable_from(int rank) {
    for (const SimulatedRank::Transfer& transfer : (*this)[rank].running)
      if (transfer.receives && first_of(transfer.peer, false, rank) != (*this)[transfer.peer].running.end())
        return transfer.peer;
    return -1;
  }
  bool can_deliver(int rank) { return deliverable_from(rank) >= 0; }
  void deliver(int rank) {
    const int peer = deliverable_from(rank);
    const auto send = first_of(peer, false, rank);
    const auto receive = first_of(rank, true, peer);
    CHECK(send->memory.bytes == receive->memory.bytes);
    std::memcpy(receive->memory.begin, send->memory.begin, send->memory.bytes);
    (*this)[peer].running.erase(send);
    (*this)[rank].running.erase(receive);
    if ((*this)[peer].is_done()) (*this)[peer].when_done((*this)[peer]);
  }
};

}  // namespace procgroup::testing
