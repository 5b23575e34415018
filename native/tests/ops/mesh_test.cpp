// Cartesian meshes: neighbours in MPI's order of ranks, and the word by which ranks compare meshes.
#include <set>
#include <string>
#include <vector>

#include "ops/descriptor.hpp"
#include "tests/check.hpp"

using namespace procgroup;

namespace {

void neighbors_are_one_step_away_along_one_dimension() {
  const Mesh mesh({2, 3}, {false, true});  // 0 1 2 / 3 4 5
  CHECK_EQUAL(mesh.ranks(), int64_t{6});
  CHECK_EQUAL(mesh.neighbor(4, 0, -1), 1);
  CHECK_EQUAL(mesh.neighbor(4, 0, 1), -1);
  CHECK_EQUAL(mesh.neighbor(1, 0, -1), -1);
  CHECK_EQUAL(mesh.neighbor(1, 0, 1), 4);
  CHECK_EQUAL(mesh.neighbor(3, 1, -1), 5);
  CHECK_EQUAL(mesh.neighbor(5, 1, 1), 3);
}

void a_rank_may_be_its_own_neighbor_and_one_rank_that_on_both_sides() {
  const Mesh mesh({1, 2}, {true, true});
  CHECK_EQUAL(mesh.neighbor(1, 0, -1), 1);
  CHECK_EQUAL(mesh.neighbor(1, 0, 1), 1);
  CHECK_EQUAL(mesh.neighbor(1, 1, -1), 0);
  CHECK_EQUAL(mesh.neighbor(1, 1, 1), 0);
}

void a_neighbor_has_this_rank_on_its_other_side() {
  for (const bool is_ring : {false, true})
    for (const std::vector<int>& shape : {std::vector{7}, {3, 4}, {2, 1, 5}, {2, 2, 2}}) {
      const Mesh mesh(shape, std::vector<bool>(shape.size(), is_ring));
      for (int rank = 0; rank < mesh.ranks(); ++rank)
        for (size_t dimension = 0; dimension < shape.size(); ++dimension)
          for (const int direction : {-1, 1})
            if (const int peer = mesh.neighbor(rank, dimension, direction); peer >= 0)
              CHECK_EQUAL(mesh.neighbor(peer, dimension, -direction), rank);
    }
}

void every_mesh_has_a_word_of_its_own_that_describes_it() {
  std::set<uint64_t> codes;
  size_t meshes = 0;
  for (int first = 1; first < 40; ++first)
    for (int second = 0; second < 40; ++second)
      for (const bool is_ring : {false, true}) {
        std::vector<int> shape{first};
        if (second > 0) shape.push_back(second);
        codes.insert(Mesh(shape, std::vector<bool>(shape.size(), is_ring)).code().value());
        ++meshes;
      }
  CHECK_EQUAL(codes.size(), meshes);
  CHECK_EQUAL(codes.count(0), size_t{0});
  CHECK_EQUAL(Mesh::describe(*Mesh({2, 3}, {true, false}).code()), "shape=(2, 3), periodic=(True, False)");
  CHECK_EQUAL(Mesh::describe(*Mesh({2147483647}, {true}).code()), "shape=(2147483647,), periodic=(True,)");
  CHECK_EQUAL(Mesh::describe(0), "shape=(,), periodic=(,)");
  for (int shift = 0; shift < 64; ++shift) Mesh::describe(~uint64_t{0} << shift);
}

void a_mesh_of_too_many_dimensions_has_no_word() {
  CHECK_EQUAL(Mesh(std::vector<int>(16, 3), std::vector<bool>(16)).code().has_value(), true);
  CHECK_EQUAL(Mesh(std::vector<int>(17, 1), std::vector<bool>(17)).code().has_value(), false);
  CHECK_EQUAL(Mesh(std::vector<int>(17, 2147483647), std::vector<bool>(17)).ranks() > 2147483647, true);
}

void an_exchange_is_described_by_its_mesh() {
  Descriptor call;
  call.op = OpKind::kNeighborAllToAll;
  call.dtype = Dtype::kFloat32;
  call.splits = *Mesh({4, 1}, {true, false}).code();
  CHECK_EQUAL(call.describe(), "neighbor_all_to_all(shape=(4, 1), periodic=(True, False)) of float32");
}

}  // namespace

int main() {
  RUN_TEST(neighbors_are_one_step_away_along_one_dimension);
  RUN_TEST(a_rank_may_be_its_own_neighbor_and_one_rank_that_on_both_sides);
  RUN_TEST(a_neighbor_has_this_rank_on_its_other_side);
  RUN_TEST(every_mesh_has_a_word_of_its_own_that_describes_it);
  RUN_TEST(a_mesh_of_too_many_dimensions_has_no_word);
  RUN_TEST(an_exchange_is_described_by_its_mesh);
}
