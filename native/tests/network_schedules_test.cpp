// Schedules for collectives over messages, executed for all ranks in one loop without any transport.
//
// The simulation is as strict as a transport may be: a message moves only when both sides have issued it, and few run
// at a time on a rank. Reductions are simulated by a function for which order matters.
#include "schedules/network_schedules.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/check.hpp"

namespace procgroup::testing {
namespace {

using Array = std::vector<uint64_t>;
using Arrays = std::vector<Array>;
using Kind = NetworkStep::Kind;
using Memory = std::pair<uint64_t*, size_t>;  // and its length

constexpr size_t kFewFlights = 2;
constexpr uint64_t kUntouched = 77;

uint64_t combine(uint64_t left, uint64_t right) { return left * 31 + right; }

// What a rank has at `index` of its input block for `block`.
uint64_t element(int rank, int block, size_t index) {
  return static_cast<uint64_t>(rank + 1) * 1'000'003 + static_cast<uint64_t>(block) * 10'007 + index;
}

// What all ranks together give there.
uint64_t reduced(int size, int block, size_t index) {
  uint64_t value = 0;
  for (int rank = 0; rank < size; ++rank) value = combine(value, element(rank, block, index));
  return value;
}

Array block_of(int rank, int block, size_t count) {
  Array made;
  for (size_t index = 0; index < count; ++index) made.push_back(element(rank, block, index));
  return made;
}

class SimulatedRank {
 public:
  struct Flight {
    bool receives;
    int peer;
    Memory memory;
  };

  SimulatedRank(OpKind op, const NetworkScheduleRequest& request, Arrays gives, Arrays takes)
      : inputs(std::move(gives)),
        outputs(std::move(takes)),
        rank_(request.rank),
        size_(request.size),
        schedule_(schedule_network(op, request)),
        scratch_(schedule_.scratch_elements, kUntouched) {}

  bool is_done() const { return next_ == schedule_.steps.size() && flights.empty(); }
  bool step();

  Arrays inputs;
  Arrays outputs;
  std::vector<Flight> flights;

 private:
  Memory at(const NetworkPlace& place, size_t elements) {
    const size_t block = static_cast<size_t>(place.block);
    Array& array = place.kind == NetworkPlace::Kind::kInput    ? inputs.at(block)
                   : place.kind == NetworkPlace::Kind::kOutput ? outputs.at(block)
                                                               : scratch_;
    CHECK(place.offset + elements <= array.size());
    return {array.data() + place.offset, elements};
  }
  bool is_busy(Memory memory, bool written) const {
    return std::ranges::any_of(flights, [&](const Flight& flight) {
      const auto [begin, count] = flight.memory;
      return (written || flight.receives) && begin < memory.first + memory.second && memory.first < begin + count;
    });
  }
  void compute(const NetworkStep& step, Memory to, Memory from);

  int rank_;
  int size_;
  NetworkSchedule schedule_;
  Array scratch_;
  size_t next_ = 0;
};

// Issue the next step; false when it must wait.
bool SimulatedRank::step() {
  if (next_ == schedule_.steps.size()) return false;
  const NetworkStep& step = schedule_.steps[next_];
  CHECK(step.elements > 0);
  const size_t sources = static_cast<size_t>(size_ - 1) * schedule_.source_stride + step.elements;
  const Memory to = step.kind == Kind::kSend ? Memory{} : at(step.to, step.elements);
  const Memory from =
      step.kind == Kind::kReceive ? Memory{} : at(step.from, step.kind == Kind::kReduce ? sources : step.elements);
  if (is_busy(to, true) || is_busy(from, false)) return false;
  if (step.kind == Kind::kReduce || step.kind == Kind::kCopy) {
    compute(step, to, from);
  } else {
    if (flights.size() >= kFewFlights) return false;
    const bool receives = step.kind == Kind::kReceive;
    flights.push_back({receives, step.peer, receives ? to : from});
  }
  ++next_;
  return true;
}

void SimulatedRank::compute(const NetworkStep& step, Memory to, Memory from) {
  if (step.kind == Kind::kCopy) {
    std::copy_n(from.first, step.elements, to.first);
    return;
  }
  const Memory own = at(step.own, step.elements);
  for (size_t index = 0; index < step.elements; ++index) {
    uint64_t value = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const size_t theirs = static_cast<size_t>(rank) * schedule_.source_stride + index;
      value = combine(value, rank == rank_ ? own.first[index] : from.first[theirs]);
    }
    to.first[index] = value;
  }
}

// The first receive of a pair gets its first send.
bool deliver_one(std::vector<SimulatedRank>& ranks) {
  for (size_t receiver = 0; receiver < ranks.size(); ++receiver) {
    auto& flights = ranks[receiver].flights;
    const auto is_sent = [&](const SimulatedRank::Flight& receive) {
      if (!receive.receives) return false;
      auto& theirs = ranks[static_cast<size_t>(receive.peer)].flights;
      const auto send = std::ranges::find_if(
          theirs, [&](const auto& flight) { return !flight.receives && flight.peer == static_cast<int>(receiver); });
      if (send == theirs.end()) return false;
      CHECK(send->memory.second == receive.memory.second);
      std::copy_n(send->memory.first, send->memory.second, receive.memory.first);
      theirs.erase(send);
      return true;
    };
    const auto receive = std::ranges::find_if(flights, is_sent);
    if (receive == flights.end()) continue;
    flights.erase(receive);
    return true;
  }
  return false;
}

void play(std::vector<SimulatedRank>& ranks) {
  do {
    for (SimulatedRank& rank : ranks) {
      while (rank.step()) {
      }
    }
  } while (deliver_one(ranks));
  for (const SimulatedRank& rank : ranks) CHECK(rank.is_done());
}

template <typename Test>
void for_each_case(const Test& test) {
  for (const int size : {1, 2, 3, 4, 5, 7}) {
    const size_t ranks = static_cast<size_t>(size);
    for (const size_t count : {size_t{0}, size_t{1}, ranks - 1, ranks, ranks + 1, size_t{97}, size_t{640}}) {
      for (const size_t segment : {size_t{1}, size_t{7}, size_t{1000}}) test(size, count, segment);
    }
  }
}

// Unequal blocks, some of them empty.
size_t uneven(int from, int to, size_t count) { return static_cast<size_t>((from * 5 + to * 3) % 4) * count / 3; }

void one_array(OpKind op, int size, size_t count, size_t segment, int root) {
  std::vector<SimulatedRank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    const NetworkScheduleRequest request{rank, size, segment, root, count, {}, {}};
    const bool writes = op != OpKind::kReduce || rank == root;
    ranks.emplace_back(op, request, Arrays{block_of(rank, 0, count)}, Arrays{Array(writes ? count : 0, kUntouched)});
  }
  play(ranks);
  for (int rank = 0; rank < size; ++rank) {
    const Arrays& outputs = ranks[static_cast<size_t>(rank)].outputs;
    for (size_t index = 0; index < outputs[0].size(); ++index) {
      CHECK(outputs[0][index] == (op == OpKind::kBroadcast ? element(root, 0, index) : reduced(size, 0, index)));
    }
    CHECK(ranks[static_cast<size_t>(rank)].inputs[0] == block_of(rank, 0, count));
  }
}

void all_reduce_reduce_and_broadcast_keep_the_order_of_ranks() {
  for_each_case([](int size, size_t count, size_t segment) {
    one_array(OpKind::kAllReduce, size, count, segment, -1);
    for (int root = 0; root < size; ++root) {
      one_array(OpKind::kReduce, size, count, segment, root);
      one_array(OpKind::kBroadcast, size, count, segment, root);
    }
  });
}

// What `from` has for `to` in an operation with blocks.
size_t part(OpKind op, int from, int to, size_t count, int root) {
  if (op == OpKind::kGather) return to == root ? count : 0;
  if (op == OpKind::kScatter) return from == root ? count : 0;
  if (op == OpKind::kAllGather) return uneven(from, 0, count);
  return op == OpKind::kReduceScatter ? uneven(0, to, count) : uneven(from, to, count);
}

void blocks(OpKind op, int size, size_t count, size_t segment, int root) {
  const bool gives_one = op == OpKind::kGather || op == OpKind::kAllGather;
  const bool takes_one = op == OpKind::kScatter || op == OpKind::kReduceScatter;
  std::vector<SimulatedRank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    NetworkScheduleRequest request{rank, size, segment, root, count, {}, {}};
    Arrays inputs;
    Arrays outputs;
    for (int peer = 0; peer < size; ++peer) {
      request.inputs.push_back(part(op, rank, peer, count, root));
      request.outputs.push_back(part(op, peer, rank, count, root));
      if (!gives_one) inputs.push_back(block_of(rank, peer, request.inputs.back()));
      if (!takes_one) outputs.emplace_back(request.outputs.back(), kUntouched);
    }
    if (gives_one) inputs.push_back(block_of(rank, 0, part(op, rank, std::max(root, 0), count, root)));
    if (takes_one) outputs.emplace_back(part(op, std::max(root, 0), rank, count, root), kUntouched);
    ranks.emplace_back(op, request, std::move(inputs), std::move(outputs));
  }
  play(ranks);
  for (int rank = 0; rank < size; ++rank) {
    const Arrays& outputs = ranks[static_cast<size_t>(rank)].outputs;
    for (size_t block = 0; block < outputs.size(); ++block) {
      const int from = takes_one ? std::max(root, 0) : static_cast<int>(block);
      const Array expected = block_of(from, gives_one ? 0 : rank, part(op, from, rank, count, root));
      for (size_t index = 0; index < expected.size(); ++index) {
        const uint64_t value = op == OpKind::kReduceScatter ? reduced(size, rank, index) : expected[index];
        CHECK(outputs[block][index] == value);
      }
    }
  }
}

void blocks_of_any_size_reach_their_places() {
  for_each_case([](int size, size_t count, size_t segment) {
    for (const OpKind op : {OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kAllToAll}) {
      blocks(op, size, count, segment, -1);
    }
    for (int root = 0; root < size; ++root) {
      blocks(OpKind::kGather, size, count, segment, root);
      blocks(OpKind::kScatter, size, count, segment, root);
    }
  });
}

void all_reduce_sends_no_more_than_it_must() {
  for (const int size : {2, 3, 4, 7}) {
    const size_t blocks = static_cast<size_t>(size);
    const NetworkSchedule schedule = schedule_network(OpKind::kAllReduce, {1, size, 9, -1, blocks * 100, {}, {}});
    size_t sent = 0;
    for (const NetworkStep& step : schedule.steps) sent += step.kind == Kind::kSend ? step.elements : 0;
    CHECK(sent == 2 * (blocks - 1) * 100);
    CHECK(schedule.scratch_elements == 2 * blocks * 9);
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(100);
  RUN_TEST(all_reduce_reduce_and_broadcast_keep_the_order_of_ranks);
  RUN_TEST(blocks_of_any_size_reach_their_places);
  RUN_TEST(all_reduce_sends_no_more_than_it_must);
}
