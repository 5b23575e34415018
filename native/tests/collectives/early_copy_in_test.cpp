// A rank copies in the first chunk of a call before the others have announced it, and may be a call ahead of them: it
// must not overwrite what they still read.
#include "tests/collectives/calls_by_hand.hpp"

using namespace procgroup;

namespace {

constexpr size_t kChunk = kTiny.chunk_bytes / sizeof(int64_t);

// One rank's part in a sequence of calls, one after the other.
struct Member {
  struct Call {
    std::vector<int64_t> data;
    Request request;
    std::vector<int64_t> expected;
  };

  explicit Member(CollectiveState shared) : state(std::move(shared)) {}

  bool is_done() const { return next == calls.size(); }
  // Advance the call in hand once; true when it has completed.
  bool advance() {
    Call& mine = *calls[next];
    if (!running) running = std::make_unique<CollectiveCall>(state, mine.request);
    if (running->advance() != Progress::kDone) return false;
    CASE("call %zu, of %zu elements, rank %d", next, mine.data.size(), state.rank);
    check(running->failure() == nullptr, "expected to end well", state.rank);
    CHECK_EQUAL(mine.data, mine.expected);
    running.reset();
    ++next;
    return true;
  }

  CollectiveState state;
  std::vector<std::unique_ptr<Call>> calls;
  std::unique_ptr<CollectiveCall> running;
  size_t next = 0;
};

class World {
  // Before `members`, which hold what is theirs.
  std::vector<Rank> ranks_;
  std::vector<const Arena*> arenas_;

 public:
  explicit World(int size) : ranks_(make_world(size)), arenas_(arenas_of(ranks_)) {
    for (int rank = 0; rank < size; ++rank) members.emplace_back(state_of(ranks_, rank, arenas_));
  }

  // All ranks' next broadcast, from rank 0, of an array of which the numbers tell the call.
  void add(size_t count) {
    const auto sequence = static_cast<int64_t>(members[0].calls.size() + 1);
    for (Member& member : members) {
      auto call = std::make_unique<Member::Call>();
      call->data = given(member.state.rank, sequence, count);
      call->expected = given(0, sequence, count);
      call->request = request_for(OpKind::kBroadcast, call->data, 0);
      call->request.descriptor.sequence = static_cast<uint64_t>(sequence);
      member.calls.push_back(std::move(call));
    }
  }

  std::vector<Member> members;

 private:
  static std::vector<int64_t> given(int rank, int64_t sequence, size_t count) {
    std::vector<int64_t> data = values(rank, count);
    for (int64_t& element : data) element += sequence * 1'000'000;
    return data;
  }
};

void a_root_copies_in_one_call_ahead() {
  World world(2);
  Member& root = world.members[0];
  Member& reader = world.members[1];
  for (int call = 0; call < 3; ++call) world.add(kChunk);
  check(!reader.advance(), "expected to wait for the root", 1);
  check(root.advance(), "expected the root not to wait for its reader", 0);
  check(!root.advance(), "expected the root to wait for the announcement", 0);
  check(root.state.mine().memory().progress.load() == 2, "expected the second call's chunk to be there", 0);
  check(reader.advance(), "expected to be done", 1);
  check(reader.advance(), "expected the second call to wait for nobody", 1);
  check(root.advance(), "expected to be done", 0);
}

void a_slot_that_may_be_read_waits(size_t slots) {
  World world(2);
  Member& root = world.members[0];
  Member& reader = world.members[1];
  world.add(slots * kChunk);
  world.add(slots * kChunk);
  reader.advance();
  check(root.advance(), "expected the root not to wait for its reader", 0);
  const uint64_t published = root.state.mine().memory().progress.load();
  root.advance();
  const bool copied_in = root.state.mine().memory().progress.load() > published;
  check(copied_in == (slots < kSlots), "expected a copy only in a slot that nobody reads", 0);
  while (!reader.is_done() || !root.is_done()) {
    if (!reader.is_done()) reader.advance();
    if (!root.is_done()) root.advance();
  }
}

void slots_that_may_be_read_wait() {
  for (size_t slots = 1; slots <= kSlots; ++slots) {
    CASE("%zu slots", slots);
    a_slot_that_may_be_read_waits(slots);
  }
}

}  // namespace

int main() {
  RUN_TEST(a_root_copies_in_one_call_ahead);
  RUN_TEST(slots_that_may_be_read_wait);
}
