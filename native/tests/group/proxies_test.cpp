// The small areas of proxies: in a staging block of the leader's pool, while the group needs them and until the last
// rank of the host has read them.
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr GroupLayout kLayout{.small_bytes = 1024, .slot_bytes = 1024, .chunk_bytes = 1024};
constexpr size_t kInLine = 4;    // elements, which fit beside an announcement
constexpr size_t kSmall = 60;    // in small areas
constexpr size_t kLarge = 5000;  // in messages and slots

std::vector<Rank> world_of(const std::vector<int>& hosts) {
  return make_world(static_cast<int>(hosts.size()), ReadingRanges::for_this_processor(), kLayout, hosts);
}

StagingPool& small_pool(const Rank& rank, size_t members) { return rank.engine->heap().small_pool(kLayout, members); }

void all_reduce(Group& group, size_t count) {
  CASE("all_reduce of %zu elements, rank %d of %d", count, group.rank(), group.size());
  NoRuntime language;
  std::vector<int64_t> data = values(group.rank(), count);
  Request request = request_for(OpKind::kAllReduce, data);
  group.calls().run(request, 60, language);
  for (size_t index = 0; index < count; ++index) CHECK_EQUAL(data[index], sum(group.size(), index));
}

void all_to_all(Group& group, size_t count) {
  CASE("all_to_all of %zu elements for each, rank %d of %d", count, group.rank(), group.size());
  NoRuntime language;
  const auto size = static_cast<size_t>(group.size());
  std::vector<int64_t> in = values(group.rank(), count * size);
  std::vector<int64_t> out(count * size);
  Request request;
  request.descriptor.op = OpKind::kAllToAll;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = count;
  for (size_t rank = 0; rank < size; ++rank) {
    request.inputs.push_back({in.data() + rank * count, count});
    request.outputs.push_back({out.data() + rank * count, count});
  }
  group.calls().run(request, 60, language);
  for (size_t rank = 0; rank < size; ++rank)
    for (size_t index = 0; index < count; ++index)
      CHECK_EQUAL(out[rank * count + index],
                  value(static_cast<int>(rank), static_cast<size_t>(group.rank()) * count + index));
}

// Ranks 0 and 1 are leaders, with two proxies each.
void only_calls_that_need_small_areas_take_a_block() {
  std::vector<Rank> world = world_of({0, 1, 0, 1});
  const auto blocks = [&] {
    std::vector<size_t> counts;
    for (size_t rank = 0; rank < world.size(); ++rank)
      counts.push_back(small_pool(world[rank], rank < 2 ? 3 : 1).blocks());
    return counts;
  };
  for (const size_t count : {size_t{1}, kInLine, kLarge})
    in_all_ranks(world, [&](Group& group) { all_reduce(group, count); });
  CHECK(blocks() == std::vector<size_t>(4, 0));
  for (const size_t count : {kSmall, kInLine, kSmall, kLarge, kSmall, kSmall})
    in_all_ranks(world, [&](Group& group) { all_reduce(group, count); });
  for (const size_t count : {size_t{7}, kLarge}) in_all_ranks(world, [&](Group& group) { all_to_all(group, count); });
  CHECK(blocks() == std::vector<size_t>(4, 1));
}

// More groups of ranks 0 and 2, on different hosts; they take blocks from the pool of rank 0 from which the group of
// all three takes its own.
class Pairs {
 public:
  Pairs(std::vector<Rank>& world, int count) {
    for (int pair = 0; pair < count; ++pair) {
      std::vector<std::unique_ptr<Group>> groups;
      for (int rank = 0; rank < 2; ++rank)
        groups.push_back(std::make_unique<Group>(*world[static_cast<size_t>(2 * rank)].engine,
                                                 GroupOptions{.id = 100 + static_cast<uint64_t>(pair),
                                                              .name = "pair",
                                                              .members = {0, 2},
                                                              .rank = rank,
                                                              .hosts = {0, 1},
                                                              .layout = kLayout}));
      for (const auto& group : groups)
        group->attach({groups[0]->members().offset(), groups[1]->members().offset()}, {0, 1});
      pairs_.push_back(std::move(groups));
    }
  }

  // A small call in each group, in turn.
  void call() {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < 2; ++rank)
      threads.emplace_back([this, rank] {
        for (const auto& groups : pairs_) all_reduce(*groups[rank], kSmall);
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<std::vector<std::unique_ptr<Group>>> pairs_;
};

// A call of rank 1, which the test advances by hand, in the group of all; rank 0 is its leader, and rank 2 elsewhere.
class SlowRank {
 public:
  explicit SlowRank(std::vector<Rank>& world)
      : arenas_(arenas_of(world)), state_(state_at(offsets_of(world), world, 1, arenas_)) {
    Engine& engine = *world[1].engine;
    state_.layout = kLayout;
    for (size_t rank = 0; rank < 2; ++rank)
      state_.members[rank] = GroupMemoryView(*arenas_[rank], world[rank].group->members().offset(), 3, kLayout);
    state_.members[2] = {};
    state_.staging = std::make_unique<Staging>(engine.heap().small_pool(kLayout, 1), engine.heap().slots_pool(kLayout),
                                               state_.mine(), std::vector{state_.members[0]});
    state_.topology = Topology({0, 0, 1}, 1);
    state_.messages.emplace(
        engine.messages(), engine.messages_mutex(), [&engine] { return engine.pump(); }, GroupView{7, 1, {0, 1, 2}});
  }

  // Announce an all_reduce, while the others make theirs.
  void announce(uint64_t sequence) {
    data_ = values(1, kSmall);
    request_ = request_for(OpKind::kAllReduce, data_);
    request_.descriptor.group = 7;
    request_.descriptor.sequence = sequence;
    call_ = std::make_unique<CollectiveCall>(state_, request_);
    while (call_->advance() == Progress::kMoved) {
    }
    CHECK(!call_->is_completed());
  }
  void read() {
    CHECK(call_->advance() == Progress::kDone && call_->failure() == nullptr);
    for (size_t index = 0; index < kSmall; ++index) CHECK(data_[index] == sum(3, index));
  }
  const GroupMemoryView& leader() const { return state_.member(0); }

 private:
  static std::vector<uint64_t> offsets_of(const std::vector<Rank>& world) {
    std::vector<uint64_t> offsets;
    for (const Rank& rank : world) offsets.push_back(rank.group->members().offset());
    return offsets;
  }

  std::vector<const Arena*> arenas_;
  CollectiveState state_;
  std::vector<int64_t> data_;
  Request request_;
  std::unique_ptr<CollectiveCall> call_;
};

void all_but_the_slow_rank_call(std::vector<Rank>& world) {
  std::thread other([&] { all_reduce(*world[2].group, kSmall); });
  all_reduce(*world[0].group, kSmall);
  other.join();
}

// The offset of the leader's small areas in that call; those of its proxies follow.
uint64_t block_of(const SlowRank& rank, uint64_t sequence) { return rank.leader().announcement(sequence).small; }

constexpr int kPairs = static_cast<int>(kKeptSmallBlocks);  // more than the blocks of two members that a pool keeps

void a_block_is_not_reused_before_all_ranks_of_the_host_have_read_it() {
  std::vector<Rank> world = world_of({0, 0, 1});
  Pairs pairs(world, kPairs);
  SlowRank slow(world);
  for (uint64_t sequence = 1; sequence < 4; ++sequence) {
    slow.announce(sequence);
    all_but_the_slow_rank_call(world);
    pairs.call();
    pairs.call();
    slow.read();
    pairs.call();  // takes over the block that all have read
    pairs.call();
  }
  CHECK(small_pool(world[0], 2).blocks() <= kKeptSmallBlocks / 2 + 1);
}

void a_leader_that_leaves_keeps_the_block_for_the_ranks_of_its_host() {
  std::vector<Rank> world = world_of({0, 0, 1});
  SlowRank slow(world);
  slow.announce(1);
  all_but_the_slow_rank_call(world);
  const uint64_t block = block_of(slow, 1);
  world[0].group.reset();
  CHECK(world[0].engine->heap().sweep() == 1);
  Pairs pairs(world, 1);
  pairs.call();
  slow.read();
  slow.leader().departed(1).store(1, std::memory_order_release);
  CHECK(world[0].engine->heap().sweep() == 0);
  StagingPool& pool = small_pool(world[0], 2);
  CHECK(pool.blocks() == 2);
  StagingPool::Lease next(pool, [](uint64_t) { return true; });
  CHECK(next.begin(1) == block && pool.blocks() == 2);
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(only_calls_that_need_small_areas_take_a_block);
  RUN_TEST(a_block_is_not_reused_before_all_ranks_of_the_host_have_read_it);
  RUN_TEST(a_leader_that_leaves_keeps_the_block_for_the_ranks_of_its_host);
}
