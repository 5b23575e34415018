// Ring plans, executed for all ranks in one loop without any transport, against a direct sum.
#include "algorithms/ring.hpp"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "tests/check.hpp"

namespace procgroup::testing {
namespace {

using Array = std::vector<int64_t>;
using Kind = RingStep::Kind;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 7};

std::vector<size_t> counts_for(int ranks) {
  const size_t size = static_cast<size_t>(ranks);
  return {0, 1, size - 1, size, size + 1, 97, 640};
}

// A receive that was issued and whose message has not come yet.
struct Awaited {
  int peer;
  int64_t* to;
  size_t elements;
};

// One rank of the simulation: its plan, how far it is, and its memory. Sends are over at once.
struct SimulatedRank {
  std::deque<Awaited> awaited;
  RingPlan plan;
  size_t next = 0;
  Array input;
  std::vector<Array> outputs;
  Array partial;
  Array result;

  int64_t* at(const RingPlace& place, size_t elements) {
    Array& array = place.kind == RingPlace::Kind::kInput     ? input
                   : place.kind == RingPlace::Kind::kOutput  ? outputs.at(static_cast<size_t>(place.rank))
                   : place.kind == RingPlace::Kind::kPartial ? partial
                                                             : result;
    CHECK(place.offset + elements <= array.size());
    return array.data() + place.offset;
  }
};

class Simulation {
 public:
  template <typename MakePlan>
  Simulation(int size, size_t count, size_t outputs, const MakePlan& make_plan) {
    for (int rank = 0; rank < size; ++rank) {
      SimulatedRank simulated;
      simulated.plan = make_plan(rank);
      simulated.partial.assign(simulated.plan.partial_elements, -7);
      simulated.result.assign(simulated.plan.result_elements, -7);
      for (size_t index = 0; index < count; ++index) simulated.input.push_back(element(rank, index));
      simulated.outputs.assign(outputs, Array(count, -9));
      ranks.push_back(std::move(simulated));
    }
  }

  static int64_t element(int rank, size_t index) { return (rank + 1) * 1'000'000 + static_cast<int64_t>(index); }

  void run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        while (step(static_cast<int>(rank))) moved = true;
      }
    }
    for (const SimulatedRank& rank : ranks) CHECK(rank.next == rank.plan.steps.size() && rank.awaited.empty());
    for (const auto& [pair, queue] : wires_) CHECK(queue.empty());
  }

  std::vector<SimulatedRank> ranks;

 private:
  // Copy what has come for the issued receives; tell whether anything had.
  bool land(int rank) {
    SimulatedRank& self = ranks[static_cast<size_t>(rank)];
    return std::erase_if(self.awaited, [&](const Awaited& receive) {
             auto& queue = wires_[{receive.peer, rank}];
             if (queue.empty()) return false;
             CHECK(queue.front().size() == receive.elements);
             std::copy(queue.front().begin(), queue.front().end(), receive.to);
             queue.pop_front();
             return true;
           }) > 0;
  }

  static bool is_awaited(const SimulatedRank& self, const int64_t* begin, size_t elements) {
    return std::any_of(self.awaited.begin(), self.awaited.end(), [&](const Awaited& receive) {
      return begin < receive.to + receive.elements && receive.to < begin + elements;
    });
  }

  bool step(int rank) {
    SimulatedRank& self = ranks[static_cast<size_t>(rank)];
    if (land(rank)) return true;
    if (self.next == self.plan.steps.size()) return false;
    const RingStep& step = self.plan.steps[self.next];
    CHECK(step.elements > 0);
    if (step.kind != Kind::kReceive && is_awaited(self, self.at(step.from, step.elements), step.elements)) return false;
    if (step.kind != Kind::kSend && is_awaited(self, self.at(step.to, step.elements), step.elements)) return false;
    if (step.kind == Kind::kSend) {
      const int64_t* from = self.at(step.from, step.elements);
      wires_[{rank, step.peer}].emplace_back(from, from + step.elements);
    } else if (step.kind == Kind::kReceive) {
      self.awaited.push_back({step.peer, self.at(step.to, step.elements), step.elements});
    } else {
      const int64_t* from = self.at(step.from, step.elements);
      int64_t* to = self.at(step.to, step.elements);
      for (size_t index = 0; index < step.elements; ++index) {
        to[index] = step.kind == Kind::kAdd ? to[index] + from[index] : from[index];
      }
    }
    ++self.next;
    return true;
  }

  std::map<std::pair<int, int>, std::deque<Array>> wires_;
};

Array direct_sum(int size, size_t count) {
  Array sum(count, 0);
  for (int rank = 0; rank < size; ++rank) {
    for (size_t index = 0; index < count; ++index) sum[index] += Simulation::element(rank, index);
  }
  return sum;
}

template <typename Test>
void for_each_case(const Test& test) {
  for (const int size : kRanks) {
    for (const size_t count : counts_for(size)) {
      for (const size_t segment : {size_t{1}, size_t{7}, size_t{1000}}) test(size, count, segment);
    }
  }
}

void all_reduce_sums_on_every_rank() {
  for_each_case([](int size, size_t count, size_t segment) {
    Simulation simulation(size, count, 1, [&](int rank) { return plan_ring_all_reduce({rank, size, count, segment}); });
    simulation.run();
    for (const SimulatedRank& rank : simulation.ranks) CHECK(rank.outputs[0] == direct_sum(size, count));
  });
}

void reduce_sums_on_the_root_only() {
  for_each_case([](int size, size_t count, size_t segment) {
    for (int root = 0; root < size; ++root) {
      Simulation simulation(size, count, 1,
                            [&](int rank) { return plan_ring_reduce({rank, size, count, segment, root}); });
      simulation.run();
      for (int rank = 0; rank < size; ++rank) {
        const Array expected = rank == root ? direct_sum(size, count) : Array(count, -9);
        CHECK(simulation.ranks[static_cast<size_t>(rank)].outputs[0] == expected);
      }
    }
  });
}

void all_gather_puts_every_input_in_its_place() {
  for_each_case([](int size, size_t count, size_t segment) {
    Simulation simulation(size, count, static_cast<size_t>(size),
                          [&](int rank) { return plan_ring_all_gather({rank, size, count, segment}); });
    simulation.run();
    for (const SimulatedRank& rank : simulation.ranks) {
      for (size_t source = 0; source < rank.outputs.size(); ++source) {
        CHECK(rank.outputs[source] == simulation.ranks[source].input);
      }
    }
  });
}

void broadcast_copies_the_root() {
  for_each_case([](int size, size_t count, size_t segment) {
    for (int root = 0; root < size; ++root) {
      Simulation simulation(size, count, 1,
                            [&](int rank) { return plan_chain_broadcast({rank, size, count, segment, root}); });
      simulation.run();
      for (const SimulatedRank& rank : simulation.ranks) {
        CHECK(rank.outputs[0] == simulation.ranks[static_cast<size_t>(root)].input);
      }
    }
  });
}

void all_reduce_sends_no_more_than_it_must() {
  for (const int size : {2, 3, 4, 7}) {
    const size_t blocks = static_cast<size_t>(size);
    const size_t count = blocks * 100;
    const RingPlan plan = plan_ring_all_reduce({1, size, count, 9});
    size_t sent = 0;
    for (const RingStep& step : plan.steps) sent += step.kind == Kind::kSend ? step.elements : 0;
    CHECK(sent == 2 * (blocks - 1) * 100);
    CHECK(plan.partial_elements == 2 * 8 * 9);
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(100);
  RUN_TEST(all_reduce_sums_on_every_rank);
  RUN_TEST(reduce_sums_on_the_root_only);
  RUN_TEST(all_gather_puts_every_input_in_its_place);
  RUN_TEST(broadcast_copies_the_root);
  RUN_TEST(all_reduce_sends_no_more_than_it_must);
}
