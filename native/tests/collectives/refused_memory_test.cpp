// A call that cannot go on, because memory is refused or a peer shows nonsense, fails and throws nothing: the thread
// that advances it may be one that has nobody to throw to.
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

void memory_that_is_refused_ends_the_call() {
  std::vector<Rank> world = make_world(2);
  const std::vector<const Arena*> arenas = arenas_of(world);
  CollectiveState states[2] = {state_of(world, 0, arenas), state_of(world, 1, arenas)};
  std::vector<int64_t> data[2] = {values(0, 20), values(1, 20)};
  Request requests[2] = {request_for(OpKind::kAllReduce, data[0]), request_for(OpKind::kAllReduce, data[1])};
  for (Request& request : requests) request.descriptor.sequence = 1;
  CollectiveCall honest(states[0], requests[0]);
  CollectiveCall hostile(states[1], requests[1]);
  check(hostile.advance() == Progress::kWaiting, "expected to wait", 1);
  states[1].mine().place_small(1, uint64_t{1} << 60);
  check(honest.advance() == Progress::kDone && honest.failure() != nullptr, "expected to fail", 0);
  check(honest.failure()->is<Broken>(), "expected a broken group", 0);
  check(honest.failure()->as<Broken>()->reason.starts_with("it cannot go on: "),
        honest.failure()->as<Broken>()->reason.c_str(), 0);
}

}  // namespace

int main() { RUN_TEST(memory_that_is_refused_ends_the_call); }
