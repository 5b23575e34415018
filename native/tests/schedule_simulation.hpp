// Runs the schedules of all ranks over simulated memory, one step of a random rank at a time: an order in which a
// schedule would read too early, or overwrite too early, is found as wrong elements.
#pragma once

#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "check.hpp"
#include "schedules/schedule.hpp"
#include "transport/group_memory.hpp"

namespace procgroup::testing {

using Elements = std::vector<uint32_t>;

struct SimulatedRank {
  std::vector<Elements> inputs;  // blocks, or one array
  std::vector<Elements> outputs;
  std::vector<Elements> slots;
  Schedule schedule;
  uint64_t progress = 0;
  size_t step = 0;
  std::function<void(SimulatedRank&)> when_done = [](SimulatedRank&) {};
};

class Simulation {
 public:
  Simulation(int size, size_t slot_bytes) : ranks(static_cast<size_t>(size)) {
    for (SimulatedRank& rank : ranks) rank.slots.assign(kSlots, Elements(slot_bytes / sizeof(uint32_t), 0xdeadbeef));
  }

  SimulatedRank& operator[](int rank) { return ranks[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }

  void run(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int> stuck;
    for (;;) {
      std::vector<int> able;
      bool all_done = true;
      for (int rank = 0; rank < size(); ++rank) {
        const SimulatedRank& mine = (*this)[rank];
        const bool done = mine.step == mine.schedule.steps.size();
        all_done = all_done && done;
        if (!done && can_run(mine.schedule.steps[mine.step])) able.push_back(rank);
      }
      if (all_done) break;
      CHECK(!able.empty());
      const int chosen = able[random() % able.size()];
      run_step(chosen);
      if ((*this)[chosen].step == (*this)[chosen].schedule.steps.size()) (*this)[chosen].when_done((*this)[chosen]);
    }
    for (const SimulatedRank& rank : ranks) {
      CHECK(rank.step == rank.schedule.steps.size());
      CHECK(rank.progress == rank.schedule.published && rank.schedule.published == ranks[0].schedule.published);
      CHECK(rank.schedule.chunks == ranks[0].schedule.chunks);
    }
  }

  std::vector<SimulatedRank> ranks;
  bool in_place = false;      // whole arrays: the input is the output
  bool input_blocks = false;  // a rank has an input block for each other

 private:
  bool can_run(const Step& step) const {
    if (step.kind != Step::Kind::kAwait) return true;
    if (step.rank != kEveryone) return ranks[static_cast<size_t>(step.rank)].progress >= step.value;
    for (const SimulatedRank& rank : ranks)
      if (rank.progress < step.value) return false;
    return true;
  }

  uint32_t* at(int rank, const Place& place, size_t bytes) {
    const bool local = place.kind == Place::Kind::kInput || place.kind == Place::Kind::kOutput;
    const bool input = place.kind == Place::Kind::kInput || place.kind == Place::Kind::kPeerInput;
    SimulatedRank& owner = (*this)[local ? rank : place.rank];
    std::vector<Elements>* arrays = input && !in_place ? &owner.inputs : &owner.outputs;
    size_t index = static_cast<size_t>(local ? place.rank : input && input_blocks ? rank : 0);
    if (place.kind == Place::Kind::kSlot) arrays = &owner.slots, index = static_cast<size_t>(place.slot);
    CHECK(index < arrays->size());
    Elements& array = (*arrays)[index];
    CHECK(place.offset % sizeof(uint32_t) == 0 && bytes % sizeof(uint32_t) == 0);
    CHECK(place.offset + bytes <= array.size() * sizeof(uint32_t));
    return array.data() + place.offset / sizeof(uint32_t);
  }

  void run_step(int rank) {
    SimulatedRank& mine = (*this)[rank];
    const Step& step = mine.schedule.steps[mine.step++];
    switch (step.kind) {
      case Step::Kind::kCopy:
      case Step::Kind::kRead:
        std::memmove(at(rank, step.to, step.bytes), at(rank, step.from, step.bytes), step.bytes);
        break;
      case Step::Kind::kReduce:
      case Step::Kind::kReadReduce:
        reduce(rank, step);
        break;
      case Step::Kind::kPublish:
        CHECK(step.value > mine.progress);
        mine.progress = step.value;
        break;
      case Step::Kind::kAwait:
        break;
    }
  }

  void reduce(int rank, const Step& step) {
    for (size_t index = 0; index < step.bytes / sizeof(uint32_t); ++index) {
      uint32_t sum = 0;
      Place from = step.from;
      for (from.rank = 0; from.rank < size(); ++from.rank)
        sum += at(rank, from.rank == rank ? step.own : from, step.bytes)[index];
      at(rank, step.to, step.bytes)[index] = sum;
      if (step.has_also) at(rank, step.also, step.bytes)[index] = sum;
    }
  }
};

}  // namespace procgroup::testing
