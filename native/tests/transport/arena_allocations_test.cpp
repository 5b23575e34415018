// What is cut from an arena: cells for small things, and staging blocks that groups expose each other.
#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "transport/arena.hpp"
#include "transport/cells.hpp"
#include "transport/staging_pool.hpp"

using namespace procgroup;

namespace {

constexpr size_t kBlock = 2 * kArenaPage;

void cells_are_zeroed_aligned_and_apart() {
  Arena arena = Arena::create(0);
  Cells cells(arena);
  std::set<uint64_t> lines;
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{65}, size_t{5000}, size_t{64 * 1024}, size_t{200'000}}) {
    for (int turn = 0; turn < 5; ++turn) {
      CASE("%zu bytes, turn %d", bytes, turn);
      const uint64_t offset = cells.take(bytes);
      CHECK(offset % 64 == 0);
      for (size_t at = 0; at < bytes; at += 64) CHECK(lines.insert(offset + at).second);
      std::byte* cell = arena.at(offset, bytes);
      for (size_t index = 0; index < bytes; ++index) CHECK(cell[index] == std::byte{0});
      std::memset(cell, 0xff, bytes);
    }
  }
}

void a_cell_that_was_given_back_is_taken_again_and_zeroed() {
  Arena arena = Arena::create(0);
  Cells cells(arena);
  const uint64_t first = cells.take(100);
  const uint64_t kept = cells.take(100);
  std::memset(arena.at(first, 128), 0xff, 128);
  cells.give_back(first, 100);
  CHECK(cells.take(64) != first);  // another size in lines
  const uint64_t again = cells.take(128);
  CHECK(again == first && again != kept);
  for (size_t index = 0; index < 128; ++index) CHECK(arena.at(again, 128)[index] == std::byte{0});
  CHECK(cells.take(100) != first);
}

void a_large_cell_leaves_the_chunk_of_small_ones() {
  Arena arena = Arena::create(0);
  Cells cells(arena);
  const uint64_t first = cells.take(64);
  cells.take(100'000);
  CHECK(cells.take(64) == first + 64);
}

void threads_take_cells_of_their_own() {
  Arena arena = Arena::create(0);
  Cells cells(arena);
  std::vector<std::thread> threads;
  for (int thread = 1; thread <= 4; ++thread)
    threads.emplace_back([&, thread] {
      for (int turn = 0; turn < 500; ++turn) {
        const uint64_t offset = cells.take(192);
        std::byte* cell = arena.at(offset, 192);
        CHECK(cell[0] == std::byte{0} && cell[191] == std::byte{0});
        std::memset(cell, thread, 192);
        CHECK(cell[0] == static_cast<std::byte>(thread) && cell[191] == static_cast<std::byte>(thread));
        cells.give_back(offset, 192);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// A lease of a group whose peers have finished the calls up to `finished`.
struct Group {
  explicit Group(StagingPool& pool) : lease(pool, [this](uint64_t sequence) { return sequence <= finished; }) {}
  uint64_t call(uint64_t sequence) {
    const uint64_t offset = lease.begin(sequence);
    lease.end();
    return offset;
  }
  std::atomic<uint64_t> finished{0};
  StagingPool::Lease lease;
};

void a_group_keeps_its_block_from_call_to_call() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  Group group(pool);
  CHECK(pool.blocks() == 0);
  const uint64_t block = group.call(1);
  CHECK(block != 0 && pool.blocks() == 1);
  for (uint64_t sequence = 2; sequence < 10; ++sequence) CHECK(group.call(sequence) == block);
  CHECK(pool.blocks() == 1);
}

void below_the_limit_each_group_gets_a_block_of_its_own() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 3);
  Group groups[3]{Group(pool), Group(pool), Group(pool)};
  std::set<uint64_t> blocks;
  for (Group& group : groups) {
    group.finished = 100;
    blocks.insert(group.call(1));
  }
  CHECK(blocks.size() == 3 && pool.blocks() == 3);
  for (Group& group : groups) CHECK(blocks.contains(group.call(2)));
}

void at_the_limit_a_block_that_all_have_read_is_taken_over() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  Group first(pool);
  Group second(pool);
  const uint64_t block = first.call(5);
  first.finished = 5;
  CHECK(second.call(1) == block && pool.blocks() == 1);
  CHECK(first.lease.surrender() == 0);  // it has none any more
}

void a_block_that_somebody_may_still_read_is_left_alone() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  Group unread(pool);
  Group running(pool);
  Group failed(pool);
  Group last(pool);
  std::set<uint64_t> blocks{unread.call(5)};
  unread.finished = 4;  // a peer is still in call 5
  blocks.insert(running.lease.begin(1));
  running.finished = 100;
  blocks.insert(failed.lease.begin(1));  // and its end() never comes
  failed.finished = 100;
  blocks.insert(last.call(1));
  CHECK(blocks.size() == 4 && pool.blocks() == 4);  // nobody has waited for a block
  running.lease.end();
  Group next(pool);
  CHECK(blocks.contains(next.call(1)) && pool.blocks() == 4);
}

void a_group_whose_block_was_taken_over_gets_another() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  Group first(pool);
  Group second(pool);
  const uint64_t block = first.call(1);
  first.finished = 1;
  CHECK(second.lease.begin(1) == block);
  const uint64_t other = first.lease.begin(2);  // while the second is at work in what was its block
  CHECK(other != block && pool.blocks() == 2);
}

void what_is_above_the_limit_goes_back_to_the_arena() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  Group first(pool);
  Group second(pool);
  first.lease.begin(1);
  second.lease.begin(1);
  CHECK(pool.blocks() == 2);
  pool.give_back(first.lease.surrender());
  CHECK(pool.blocks() == 1);
  const uint64_t kept = second.lease.surrender();
  pool.give_back(kept);
  CHECK(pool.blocks() == 1);  // as many as it means to keep
  Group third(pool);
  CHECK(third.call(1) == kept);
  CHECK(first.lease.surrender() == 0);
}

void a_lease_that_has_ended_is_not_looked_at() {
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 1);
  uint64_t block = 0;
  {
    Group gone(pool);
    gone.finished = 100;
    block = gone.call(1);
    CHECK(gone.lease.surrender() == block);
  }
  Group next(pool);
  CHECK(next.call(1) != block && pool.blocks() == 2);  // peers may still read it: nobody has given it back
}

void groups_of_several_threads_never_share_a_block() {
  constexpr int kThreads = 4;
  Arena arena = Arena::create(0);
  StagingPool pool(arena, kBlock, 2);
  std::vector<std::thread> threads;
  for (int thread = 1; thread <= kThreads; ++thread)
    threads.emplace_back([&, thread] {
      Group groups[2]{Group(pool), Group(pool)};
      for (uint64_t sequence = 1; sequence < 400; ++sequence) {
        Group& group = groups[sequence % 2];
        group.finished = sequence - 1;
        std::byte* block = arena.at(group.lease.begin(sequence), kBlock);
        std::memset(block, thread, kBlock);
        CHECK(block[0] == static_cast<std::byte>(thread) && block[kBlock - 1] == static_cast<std::byte>(thread));
        group.finished = sequence;
        group.lease.end();
      }
      for (Group& group : groups)
        if (const uint64_t offset = group.lease.surrender(); offset != 0) pool.give_back(offset);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.blocks() >= 1 && pool.blocks() <= 2);
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(cells_are_zeroed_aligned_and_apart);
  RUN_TEST(a_cell_that_was_given_back_is_taken_again_and_zeroed);
  RUN_TEST(a_large_cell_leaves_the_chunk_of_small_ones);
  RUN_TEST(threads_take_cells_of_their_own);
  RUN_TEST(a_group_keeps_its_block_from_call_to_call);
  RUN_TEST(below_the_limit_each_group_gets_a_block_of_its_own);
  RUN_TEST(at_the_limit_a_block_that_all_have_read_is_taken_over);
  RUN_TEST(a_block_that_somebody_may_still_read_is_left_alone);
  RUN_TEST(a_group_whose_block_was_taken_over_gets_another);
  RUN_TEST(what_is_above_the_limit_goes_back_to_the_arena);
  RUN_TEST(a_lease_that_has_ended_is_not_looked_at);
  RUN_TEST(groups_of_several_threads_never_share_a_block);
}
