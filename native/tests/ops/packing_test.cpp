// Lists of arrays that are reduced in packs: which go together, and that every element comes back to where it was.
#include "ops/packing.hpp"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

void require(bool condition, const char* what) { check(condition, what, -1); }

std::vector<ReducedArray> any_sizes(unsigned seed) {
  constexpr Dtype kSome[] = {Dtype::kUint8, Dtype::kFloat32, Dtype::kComplex128};
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax};
  std::mt19937 random(seed);
  std::vector<ReducedArray> arrays(random() % 300);
  for (ReducedArray& array : arrays) {
    array.dtype = kSome[random() % 3];
    array.op = kOps[random() % 2];
    array.block.count = random() % (random() % 4 == 0 ? 40'000 : 600);
  }
  return arrays;
}

size_t bytes_of(const ReducedArray& array) { return array.block.count * dtype_size(array.dtype); }

void every_array_is_in_one_pack_with_its_like_and_no_pack_is_too_large() {
  for (unsigned seed = testing::test_seed(0); seed != testing::test_seed(50); ++seed) {
    CASE("seed %u", seed);
    const std::vector<ReducedArray> arrays = any_sizes(seed);
    std::vector<int> seen(arrays.size());
    for (const std::vector<size_t>& pack : assign_packs(arrays, false)) {
      require(std::ranges::is_sorted(pack), "a pack is in the order of the list");
      size_t bytes = 0;
      for (const size_t index : pack) {
        ++seen[index];
        bytes += bytes_of(arrays[index]);
        require(arrays[index].dtype == arrays[pack[0]].dtype && arrays[index].op == arrays[pack[0]].op, "like to like");
        require(pack.size() == 1 || bytes_of(arrays[index]) <= kPackedArrayBytes, "large arrays are alone");
      }
      require(pack.size() == 1 || bytes <= kPackBytes, "a pack is bounded");
    }
    require(std::ranges::all_of(seen, [](int times) { return times == 1; }), "each array once");
  }
}

void small_arrays_are_few_packs_and_arrays_that_share_memory_are_alone_in_their_order() {
  const std::vector<ReducedArray> arrays(1000, {{nullptr, 100}, Dtype::kFloat32, ReduceOp::kSum});
  require(assign_packs(arrays, false).size() == 2, "as few packs as hold them");
  const std::vector<std::vector<size_t>> alone = assign_packs(arrays, true);
  require(alone.size() == arrays.size(), "alone");
  for (size_t index = 0; index < alone.size(); ++index)
    require(alone[index] == std::vector<size_t>{index}, "in their order");
}

// The list of one rank, with one array that is too large for a pack. All ranks have the same sizes.
struct List {
  List(int rank, unsigned seed, ReduceOp op) {
    std::mt19937 random(seed);
    std::vector<size_t> counts(random() % 40 + 1);
    for (size_t& count : counts) count = random() % 60;
    counts.push_back(kPackedArrayBytes / sizeof(double) + 1);
    for (const size_t count : counts) {
      std::vector<double>& array = data.emplace_back(count);
      for (size_t index = 0; index < count; ++index) array[index] = static_cast<double>(value(rank, index));
      const double factor = op == ReduceOp::kPremulSum ? static_cast<double>(random() % 5) : 1.0;
      arrays.push_back({{array.data(), count}, Dtype::kFloat64, op, factor});
    }
  }

  std::vector<Request> requests() const {
    std::vector<Request> made;
    for (const std::vector<size_t>& pack : assign_packs(arrays, false)) {
      std::vector<ReducedArray> packed;
      for (const size_t index : pack) packed.push_back(arrays[index]);
      made.push_back(all_reduce_of(std::move(packed)));
    }
    return made;
  }
  bool holds_sums(int size) const {
    for (size_t index = 0; index < data.size(); ++index)
      for (size_t element = 0; element < data[index].size(); ++element)
        if (data[index][element] != arrays[index].factor * static_cast<double>(sum(size, element))) return false;
    return true;
  }

  std::vector<std::vector<double>> data;
  std::vector<ReducedArray> arrays;
};

void reduce_at_once(Group& group, unsigned seed, ReduceOp op) {
  const List list(group.rank(), seed, op);
  NoRuntime language;
  for (Request& request : list.requests()) group.calls().run(request, 60, language);
  check(list.holds_sums(group.size()), "a list that is reduced at once", group.rank());
}

void reduce_later(Group& group, unsigned seed, ReduceOp op) {
  const List list(group.rank(), seed, op);
  std::vector<std::shared_ptr<GroupOperation>> operations;
  for (Request& request : list.requests()) operations.push_back(group.calls().start(std::move(request), 60));
  Request barrier;  // comes after all of them
  NoRuntime language;
  group.calls().run(barrier, 60, language);
  for (const auto& operation : operations)
    check(operation->is_completed() && !operation->failure(), "over", group.rank());
  check(list.holds_sums(group.size()), "a list that is reduced later", group.rank());
}

void every_array_gets_its_sums_on_every_rank() {
  for (const int size : {2, 3, 4}) {
    std::vector<Rank> world = make_world(size);
    in_all_ranks(world, [](Group& group) {
      for (unsigned seed = testing::test_seed(0); seed != testing::test_seed(8); ++seed)
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kPremulSum}) {
          CASE("seed %u, %s", seed, reduce_op_name(op));
          reduce_at_once(group, seed, op);
          reduce_later(group, seed, op);
        }
    });
  }
}

void sizes_that_differ_are_a_mismatch_that_changes_nothing() {
  for (const bool same_sum : {true, false}) {
    CASE("as many elements in all %d", same_sum);
    std::vector<Rank> world = make_world(2);
    in_all_ranks(world, [same_sum](Group& group) {
      std::vector<double> one(group.rank() == 0 ? 3 : 5, 7.0);
      std::vector<double> two(group.rank() == 0 ? 5 : same_sum ? 3 : 4, 7.0);
      std::vector<ReducedArray> arrays;
      for (std::vector<double>* array : {&one, &two})
        arrays.push_back({{array->data(), array->size()}, Dtype::kFloat64, ReduceOp::kSum});
      Request request = all_reduce_of(arrays);
      NoRuntime language;
      try {
        group.calls().run(request, 60, language);
        check(false, "expected a mismatch", group.rank());
      } catch (const OperationFailed& failed) {
        check(failed.failure.is<Mismatch>(), "a mismatch", group.rank());
        check(failed.failure.as<Mismatch>()->calls[0] != failed.failure.as<Mismatch>()->calls[1],
              "that tells the calls apart", group.rank());
      }
      one.insert(one.end(), two.begin(), two.end());
      check(std::ranges::all_of(one, [](double element) { return element == 7.0; }), "kept", group.rank());
    });
  }
}

}  // namespace

int main() {
  RUN_TEST(every_array_is_in_one_pack_with_its_like_and_no_pack_is_too_large);
  RUN_TEST(small_arrays_are_few_packs_and_arrays_that_share_memory_are_alone_in_their_order);
  RUN_TEST(every_array_gets_its_sums_on_every_rank);
  RUN_TEST(sizes_that_differ_are_a_mismatch_that_changes_nothing);
}
