// What one call is, in a fixed-size record that all ranks of the group must agree on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtype/dtype.hpp"
#include "ops/operations.hpp"

namespace procgroup {

// For people: "rank 1", or where the group's ranks have other numbers in the job: "rank 3 (rank 1 of the group)".
// `global_ranks` maps group ranks to global ones; null or empty: they are the same.
std::string rank_name(int rank, const std::vector<int>* global_ranks);

// A Cartesian mesh of all ranks of a group, in the order of MPI_Cart_create: the last coordinate is the fastest.
class Mesh {
 public:
  // As long as each other; extents are at least 1.
  Mesh(std::vector<int> shape, std::vector<bool> periodic) : shape_(std::move(shape)), periodic_(std::move(periodic)) {}

  size_t dimensions() const { return shape_.size(); }
  int64_t ranks() const;
  // The rank next to another one along a dimension, in that direction (-1 or 1); -1 beyond a border. It may be the rank
  // itself.
  int neighbor(int rank, size_t dimension, int direction) const;
  // The mesh in one word, which is not zero; nothing for a mesh of too many dimensions.
  std::optional<uint64_t> code() const;
  // For people: "shape=(2, 3), periodic=(True, False)". Safe for any word.
  static std::string describe(uint64_t code);

 private:
  std::vector<int> shape_;
  std::vector<bool> periodic_;
};

struct Descriptor {
  uint64_t group = 0;
  uint64_t sequence = 0;
  OpKind op = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  // Combine in rank order whatever the layout of the ranks: deterministic="order". A schedule that does not must not be
  // chosen for such a call.
  bool ordered : 1 = false;
  // Another backend than the engine moves the bytes, once all ranks agree.
  bool external : 1 = false;
  // The arrays are in the memory of a device, and so the backend is that of the device.
  bool on_device : 1 = false;
  // The call becomes part of a graph of such work, which is launched later, and moves nothing now.
  bool captured : 1 = false;
  // The elements are Python's integers, which the caller combines by `reduce_op` when it has them: an all_gather that
  // is an all_reduce for the program.
  bool of_integers : 1 = false;
  uint8_t unused : 3 = 0;  // every bit has a value: descriptors are compared as bytes
  int32_t root = -1;
  // Elements of the array, or of one block; of all blocks together where they differ by rank (`splits`); zero where
  // they differ by pair, because they are compared by pair.
  uint64_t count = 0;
  // Of unequal blocks, and of several arrays in one call: a hash of their sizes, never zero. Of an exchange between
  // neighbours: Mesh::code.
  uint64_t splits = 0;

  // A copy of what another rank wrote, and may be writing: every field has a value, if not one that means anything.
  static Descriptor copied_from(const void* written);

  // Of the operation that the program called.
  const char* name() const { return of_integers ? op_name(OpKind::kAllReduce) : op_name(op); }
  size_t bytes() const { return count * dtype_size(dtype); }
  // Equal on all ranks exactly when they made the same call (up to a 64-bit hash).
  uint64_t fingerprint() const;
  // For people: "all_reduce(SUM) of 1000 float32". Safe for what another rank wrote: it may name what does not exist.
  std::string describe(const std::vector<int>* global_ranks = nullptr) const;
};

}  // namespace procgroup
