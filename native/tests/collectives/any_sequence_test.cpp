// Calls of every kind and size, one after the other in each of several groups, however far one rank is ahead of
// another. Their data travels beside the announcement, in small areas, in slots and by reads, in turn; the groups take
// staging blocks from each other.
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "tests/collectives/any_call.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr size_t kGroups = kKeptSlotsBlocks + 2;
constexpr size_t kCalls = 4 * kAnnouncements;
// Beginning above what is small, so that all ways are taken.
constexpr SizeRange kRead{.from = 2000, .to = 5000};

// One rank's part in the calls of one group.
class Member {
 public:
  Member(CollectiveState state, const std::vector<CallKind>& calls) : state_(std::move(state)), calls_(calls) {
    state_.reads_everything = true;
    state_.reading = ReadingRanges::all(kRead);
    begin();
  }

  bool is_done() const { return next_ == calls_.size(); }
  void advance() {
    if (!running_) running_ = std::make_unique<CollectiveCall>(state_, call_->request());
    if (running_->advance() != Progress::kDone) return;
    CASE("call %zu, %s of %zu elements, root %d, rank %d", next_, op_name(calls_[next_].op), calls_[next_].count,
         calls_[next_].root, state_.rank);
    check(running_->failure() == nullptr, "expected to end well", state_.rank);
    check(call_->is_right(), "wrong numbers", state_.rank);
    call_->overwrite();
    running_.reset();
    ++next_;
    begin();
  }

 private:
  void begin() {
    if (is_done()) return;
    call_ = std::make_unique<AnyCall>(calls_[next_], static_cast<int64_t>(next_), state_.rank, state_.size());
    call_->request().descriptor.sequence = next_ + 1;
  }

  CollectiveState state_;
  const std::vector<CallKind>& calls_;
  size_t next_ = 0;
  std::unique_ptr<AnyCall> call_;
  std::unique_ptr<CollectiveCall> running_;
};

// One of the calls in which ranks do not wait for each other, most often with data that fits beside the announcement.
// In a row of them the same ranks are ahead.
CallKind any_rooted_call(std::mt19937& random, bool from_root) {
  constexpr OpKind kFromRoot[] = {OpKind::kBroadcast, OpKind::kScatter};
  constexpr OpKind kToRoot[] = {OpKind::kReduce, OpKind::kGather};
  return {.op = (from_root ? kFromRoot : kToRoot)[random() % 2], .count = random() % 40 == 0 ? 20 : size_t{1}};
}

size_t any_count(std::mt19937& random) {
  const size_t largest = random() % 3 == 0 ? 40 : 6 * kTiny.chunk_bytes / sizeof(int64_t);
  return random() % largest + 1;
}

void any_sequence_in_any_order(int size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Rank> world = make_world(size);
  const std::vector<const Arena*> arenas = arenas_of(world);
  std::vector<std::vector<CallKind>> calls(kGroups);
  std::vector<std::unique_ptr<Member>> members;
  for (std::vector<CallKind>& sequence : calls) {
    const bool is_mostly_rooted = random() % 2 == 0;
    const bool from_root = random() % 2 == 0;
    for (size_t call = 0; call < kCalls; ++call)
      if (is_mostly_rooted && random() % 40 != 0)
        sequence.push_back(any_rooted_call(random, from_root));
      else
        sequence.push_back({.op = kAllOps[random() % std::size(kAllOps)],
                            .count = any_count(random),
                            .root = static_cast<int>(random() % static_cast<unsigned>(size))});
    std::vector<uint64_t> offsets;
    for (const Rank& rank : world) offsets.push_back(rank.engine->heap().take(GroupLayout::memory_bytes(world.size())));
    for (int rank = 0; rank < size; ++rank)
      members.push_back(std::make_unique<Member>(state_at(offsets, world, rank, arenas), sequence));
  }
  while (!members.empty()) {
    const size_t chosen = random() % members.size();
    // Often enough to come as far as the others let it.
    for (unsigned times = random() % 8 + 1; times != 0 && !members[chosen]->is_done(); --times)
      members[chosen]->advance();
    if (!members[chosen]->is_done()) continue;
    std::swap(members[chosen], members.back());
    members.pop_back();
  }
}

void any_sequences_in_any_order() {
  for (const int size : {2, 3, 4})
    for (unsigned seed = testing::test_seed(0); seed != testing::test_seed(10); ++seed) {
      CASE("%d ranks, seed %u", size, seed);
      any_sequence_in_any_order(size, seed);
    }
}

}  // namespace

int main() { RUN_TEST(any_sequences_in_any_order); }
