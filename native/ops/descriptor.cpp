#include "ops/descriptor.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace procgroup {
namespace {

// One round of a multiply-xorshift hash: cheap, and every input bit reaches every output bit.
uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

const char* python_name(Dtype dtype) { return dtype == Dtype::kBool ? "Python bool" : "Python int"; }

// A code has a number for each dimension, in digits of 4 bits, the least first: a mark that more follow, and 3 bits.
constexpr int kDigitBits = 4;
constexpr uint64_t kDigit = 7;
constexpr uint64_t kMoreDigits = 8;

}  // namespace

int64_t Mesh::ranks() const {
  int64_t ranks = 1;
  for (const int extent : shape_) ranks = ranks > INT32_MAX ? ranks : ranks * extent;
  return ranks;
}

int Mesh::neighbor(int rank, size_t dimension, int direction) const {
  int stride = 1;
  for (size_t later = dimension + 1; later < shape_.size(); ++later) stride *= shape_[later];
  const int extent = shape_[dimension];
  const int coordinate = rank / stride % extent;
  const int next = coordinate + direction;
  if ((next < 0 || next >= extent) && !periodic_[dimension]) return -1;
  return rank + ((next + extent) % extent - coordinate) * stride;
}

std::optional<uint64_t> Mesh::code() const {
  uint64_t code = 0;
  int shift = 0;
  for (size_t dimension = 0; dimension < shape_.size(); ++dimension) {
    uint64_t number = uint64_t{static_cast<uint32_t>(shape_[dimension])} * 2 + (periodic_[dimension] ? 1 : 0);
    for (; number != 0; number >>= 3, shift += kDigitBits) {
      if (shift == 64) return std::nullopt;
      code |= ((number & kDigit) | (number > kDigit ? kMoreDigits : 0)) << shift;
    }
  }
  return code;
}

std::string Mesh::describe(uint64_t code) {
  std::string shape;
  std::string periodic;
  while (code != 0) {
    uint64_t number = 0;
    bool has_more = true;
    for (int bits = 0; has_more && bits < 64; bits += 3, code >>= kDigitBits) {
      number |= (code & kDigit) << bits;
      has_more = (code & kMoreDigits) != 0;
    }
    shape += (shape.empty() ? "" : ", ") + std::to_string(number / 2);
    periodic += std::string(periodic.empty() ? "" : ", ") + (number % 2 == 1 ? "True" : "False");
  }
  const char* const end = shape.find(',') == std::string::npos ? ",)" : ")";
  return "shape=(" + shape + end + ", periodic=(" + periodic + end;
}

Descriptor Descriptor::copied_from(const void* written) {
  std::array<std::byte, sizeof(Descriptor)> bytes;
  std::memcpy(bytes.data(), written, bytes.size());
  return std::bit_cast<Descriptor>(bytes);
}

uint64_t Descriptor::fingerprint() const {
  const uint64_t kinds = uint64_t{static_cast<uint8_t>(op)} | uint64_t{static_cast<uint8_t>(dtype)} << 8 |
                         uint64_t{static_cast<uint8_t>(reduce_op)} << 16 | uint64_t{ordered} << 24 |
                         uint64_t{external} << 25 | uint64_t{on_device} << 26 | uint64_t{captured} << 27 |
                         uint64_t{of_integers} << 28 | uint64_t{static_cast<uint32_t>(root)} << 32;
  return mix(mix(mix(mix(mix(0x70726f6367726f75, group), sequence), kinds), count), splits);
}

std::string rank_name(int rank, const std::vector<int>* global_ranks) {
  const std::string name = "rank " + std::to_string(rank);
  if (global_ranks == nullptr || rank < 0 || static_cast<size_t>(rank) >= global_ranks->size()) return name;
  const int global = (*global_ranks)[static_cast<size_t>(rank)];
  return global == rank ? name : "rank " + std::to_string(global) + " (" + name + " of the group)";
}

std::string Descriptor::describe(const std::vector<int>* global_ranks) const {
  if (op == kMakesGroup) return op_name(op);
  const bool known = is_operation(op) && static_cast<int>(dtype) < kDtypes && static_cast<int>(reduce_op) < kReduceOps;
  if (!known) return "a call that this version does not know";
  std::string text = name();
  const OperationRow& row = row_of(op);
  if (op == OpKind::kRankFirst) return text + "(" + rank_name(root, global_ranks) + ")";
  // The last digits of a hash of sizes tell apart those that come to the same.
  const std::string sizes = ", sizes #" + std::to_string(splits % 1'000'000);
  if (op == OpKind::kEmpty || op == OpKind::kRegisterMemPool)
    return text + " of " + std::to_string(count) + " bytes on a GPU" + (splits != 0 ? sizes : "");
  if (row.input == Arrays::kNone && row.output == Arrays::kNone) return external ? text + " to open a backend" : text;
  if (reduces(op) || of_integers) text += std::string("(") + reduce_op_name(reduce_op) + (ordered ? ", ordered)" : ")");
  if (op == OpKind::kNeighborAllToAll) text += "(" + Mesh::describe(splits) + ")";
  text += row.sizes == Sizes::kPerPair ? " of " : " of " + std::to_string(count) + " ";
  text += of_integers ? python_name(dtype) : dtype_name(dtype);
  if (splits != 0 && row.sizes != Sizes::kPerPair) {
    const char* const several = on_device ? " in several arrays or another order" : " in several arrays";
    text += (row.sizes == Sizes::kEqual ? several : " in unequal blocks") + sizes;
  }
  const bool comes = row.givers == Ranks::kRoot || row.givers == Ranks::kNone;
  if (on_device)
    text += " on a GPU";
  else if (external)
    text += " by another backend";
  if (captured) text += " (captured in a CUDA graph)";
  if (root >= 0) text += (comes ? " from " : " to ") + rank_name(root, global_ranks);
  return text;
}

}  // namespace procgroup
