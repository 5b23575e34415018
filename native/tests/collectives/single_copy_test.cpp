// Calls of the usual staging areas end right: around each limit of both sets of ranges, whatever the processor; and
// with arrays in arenas, on all ranks or on some.
#include <cstdio>
#include <vector>

#include "tests/collectives/any_call.hpp"

using namespace procgroup;

namespace {

void run(Group& group, CallKind kind, int64_t number, Arena* arena = nullptr) {
  CASE("%s of %zu elements, root %d, array in the arena %d", op_name(kind.op), kind.count, kind.root, arena != nullptr);
  NoRuntime language;
  AnyCall call(kind, number, group.rank(), group.size(), arena);
  group.calls().run(call.request(), 60, language);
  check(call.is_right(), "wrong numbers", group.rank());
}

void around_each_limit(int size, const ReadingRanges& reading) {
  std::vector<Rank> world = make_world(size, reading, GroupLayout{});
  in_all_ranks(world, [&](Group& group) {
    int64_t number = 0;
    for (const OpKind op : kAllOps) {
      const auto [from, to] = reading.of(op);
      for (const size_t limit : {from, to}) {
        if (limit == SIZE_MAX) continue;
        const size_t count = limit / sizeof(int64_t);
        for (const size_t one : {count - 1, count})
          run(group, {.op = op, .count = one, .root = static_cast<int>(one % static_cast<size_t>(size))}, ++number);
      }
    }
  });
}

void arrays_in_arenas(int size, bool everywhere) {
  std::vector<Rank> world = make_world(size, ReadingRanges::all({}), GroupLayout{});
  in_all_ranks(world, [&](Group& group) {
    int64_t number = 0;
    Arena& arena = world[static_cast<size_t>(group.rank())].engine->arena();
    for (const OpKind op : kAllOps)
      for (const size_t count : {3, 10'000, 50'001, 200'000}) {
        const int root = ++number % size;
        run(group, {.op = op, .count = count, .root = root}, number,
            everywhere || group.rank() == root ? &arena : nullptr);
      }
  });
}

}  // namespace

int main() {
  RUN_TEST(around_each_limit, 2, ReadingRanges::with_fast_string_copies());
  RUN_TEST(around_each_limit, 2, ReadingRanges::with_slow_string_copies());
  for (const int size : {2, 3})
    for (const bool everywhere : {true, false}) RUN_TEST(arrays_in_arenas, size, everywhere);
}
