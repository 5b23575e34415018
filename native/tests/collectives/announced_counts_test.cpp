// all_to_all among ranks that announce sizes which they do not have: the others refuse them, or finish as if they had
// not seen them; in neither case do they read or write outside of an array, or make a schedule without end.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "collectives/buffer_table.hpp"
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr int kSize = 3;
constexpr uint64_t kSequence = 1;
constexpr uint64_t kTooMany = uint64_t{1} << 60;  // int64 in 2^63 bytes
constexpr size_t kSmall = 2;
constexpr size_t kLarge = 1000;  // many chunks of kTiny

int64_t element(int from, int to, size_t index) { return from * 1'000'000 + to * 10'000 + static_cast<int64_t>(index); }

// One rank's part: `count` elements from every rank to every rank.
class Iovec {
 public:
  Iovec(std::vector<Rank>& world, int rank, const std::vector<const Arena*>& arenas, size_t count)
      : state(state_of(world, rank, arenas)), inputs_(kSize), outputs_(kSize) {
    request_.descriptor.op = OpKind::kAllToAll;
    request_.descriptor.dtype = Dtype::kInt64;
    request_.descriptor.sequence = kSequence;
    for (size_t peer = 0; peer < kSize; ++peer) {
      for (size_t index = 0; index < count; ++index)
        inputs_[peer].push_back(element(rank, static_cast<int>(peer), index));
      outputs_[peer].assign(count, -1);
      request_.inputs.push_back({inputs_[peer].data(), count});
      request_.outputs.push_back({outputs_[peer].data(), count});
    }
    call.emplace(state, request_);
  }
  Iovec(const Iovec&) = delete;

  BufferTable table() const { return {state.member(state.rank).small(kSequence), kSize}; }
  bool is_untouched() const {
    for (const std::vector<int64_t>& output : outputs_)
      for (const int64_t got : output)
        if (got != -1) return false;
    return true;
  }
  bool is_right() const {
    for (size_t from = 0; from < kSize; ++from)
      for (size_t index = 0; index < outputs_[from].size(); ++index)
        if (outputs_[from][index] != element(static_cast<int>(from), state.rank, index)) return false;
    return true;
  }

  CollectiveState state;
  std::optional<CollectiveCall> call;

 private:
  std::vector<std::vector<int64_t>> inputs_, outputs_;
  Request request_;
};

class World {
  std::vector<Rank> ranks_ = make_world(kSize);
  std::vector<const Arena*> arenas_ = arenas_of(ranks_);

 public:
  // Ranks 1 and 2 have announced their calls.
  explicit World(size_t count) {
    for (int rank = 0; rank < kSize; ++rank) iovecs.push_back(std::make_unique<Iovec>(ranks_, rank, arenas_, count));
    for (const int rank : {1, 2}) check(iovecs[rank]->call->advance() == Progress::kWaiting, "announces", rank);
  }

  // Make what these ranks say of one pair, to both of its ends.
  void forge(int from, int to, uint64_t count) {
    iovecs[static_cast<size_t>(from)]->table().input(to).count = count;
    iovecs[static_cast<size_t>(to)]->table().output(from).count = count;
  }

  std::vector<std::unique_ptr<Iovec>> iovecs;
};

struct Forgery {
  std::function<void(World&)> forge;
  FailureKind kind;
  int peer;
  std::string reason;
};

std::vector<Forgery> forgeries(size_t count) {
  const std::string most = ", expected less than 2^63 bytes ";
  const uint64_t wraps = std::numeric_limits<uint64_t>::max() - 2 * count + 1;  // all that it gives comes to zero
  return {
      {[](World& world) { world.forge(1, 1, kTooMany); }, FailureKind::kFailed, 1,
       "it announced that it gives 1152921504606846976 int64 to rank 1" + most + "to all ranks together"},
      {[=](World& world) { world.forge(1, 1, wraps); }, FailureKind::kFailed, 1,
       "it announced that it gives " + std::to_string(wraps) + " int64 to rank 1" + most + "to all ranks together"},
      {[](World& world) { world.forge(1, 2, kTooMany); }, FailureKind::kFailed, 1,
       "it announced that it gives 1152921504606846976 int64 to rank 2" + most + "to all ranks together"},
      {[](World& world) { world.forge(1, 2, kTooMany / 2), world.forge(2, 2, kTooMany / 2); }, FailureKind::kFailed, 2,
       "it announced that it expects 576460752303423488 int64 from rank 2" + most + "from all ranks together"},
      {[](World& world) { world.iovecs[1]->table().input(0).count = kTooMany; }, FailureKind::kMismatch, -1,
       "rank 1 gives 1152921504606846976 int64 to rank 0, which expects " + std::to_string(count) + " int64 from it"},
      {[](World& world) { world.iovecs[1]->table().output(0).count = kTooMany; }, FailureKind::kMismatch, -1,
       "rank 0 gives " + std::to_string(count) + " int64 to rank 1, which expects 1152921504606846976 int64 from it"},
  };
}

void counts_that_no_memory_holds_are_refused(size_t count) {
  for (const Forgery& forgery : forgeries(count)) {
    CASE("expecting '%s'", forgery.reason.c_str());
    World world(count);
    forgery.forge(world);
    Iovec& victim = *world.iovecs[0];
    check(victim.call->advance() == Progress::kDone, "expected a verdict at once", 0);
    const Failure* failure = victim.call->failure();
    check(failure != nullptr && failure->kind() == forgery.kind && failure->culprit() == forgery.peer, "kind, rank", 0);
    check(failure->reason() == forgery.reason, failure->reason().c_str(), 0);
    check(victim.is_untouched(), "expected no output to be written", 0);
  }
}

// Each end of the pair is described by what its own rank does.
void a_mismatch_says_who_gives_and_who_expects() {
  Descriptor call;
  call.op = OpKind::kAllToAll;
  call.dtype = Dtype::kInt64;
  PairCounts counts;
  const std::optional<Failure> failure = counts.read(
      call, kSize, [](int from, int to) { return from == 2 && to == 1 ? 5 : 4; }, [](int, int) { return 4; });
  check(failure && failure->is<Mismatch>(), "expected a mismatch", 0);
  CHECK_EQUAL(failure->as<Mismatch>()->reason, "rank 2 gives 5 int64 to rank 1, which expects 4 int64 from it");
  CHECK_EQUAL(failure->as<Mismatch>()->calls.size(), size_t{kSize});
  CHECK_EQUAL(failure->as<Mismatch>()->calls[0], call.describe());
  CHECK_EQUAL(failure->as<Mismatch>()->calls[1], call.describe() + ", 4 int64 from rank 2");
  CHECK_EQUAL(failure->as<Mismatch>()->calls[2], call.describe() + ", 5 int64 to rank 1");
}

// What ranks say of a pair that does not concern this rank, while it looks: as much as they may say.
void counts_of_others_do_not_make_a_schedule_longer() {
  for (const int to : {1, 2}) {
    CASE("to rank %d", to);
    World world(kLarge);
    world.forge(1, to, kTooMany - 1 - 2 * kLarge);
    Iovec& victim = *world.iovecs[0];
    victim.call->advance();
    check(victim.state.schedule.steps.size() < 500, "expected a schedule for its own blocks", 0);
    world.forge(1, to, kLarge);
    for (int turn = 0; turn < 1000; ++turn)
      for (const auto& part : world.iovecs)
        if (!part->call->is_completed()) part->call->advance();
    check(victim.call->is_completed() && victim.call->failure() == nullptr, "expected to end well", 0);
    check(victim.is_right(), "wrong numbers", 0);
  }
}

// All others can write a rank's buffer table.
void a_ranks_own_counts_are_those_of_its_arrays(size_t count) {
  World world(count);
  Iovec& victim = *world.iovecs[1];
  victim.table().input(1).count = victim.table().output(1).count = kTooMany;
  victim.table().input(0).count = victim.table().output(0).count = kTooMany;
  for (int turn = 0; turn < 1000; ++turn) {
    world.iovecs[0]->call->advance();
    if (!victim.call->is_completed()) victim.call->advance();
  }
  check(world.iovecs[0]->call->failure()->is<Mismatch>(), "expected a mismatch", 0);
  check(victim.call->failure() == nullptr, "expected not to refuse its own arrays", 1);
}

}  // namespace

int main() {
  for (const size_t count : {kSmall, kLarge}) {
    CASE("%zu elements", count);
    RUN_TEST(counts_that_no_memory_holds_are_refused, count);
    RUN_TEST(a_ranks_own_counts_are_those_of_its_arrays, count);
  }
  RUN_TEST(a_mismatch_says_who_gives_and_who_expects);
  RUN_TEST(counts_of_others_do_not_make_a_schedule_longer);
}
