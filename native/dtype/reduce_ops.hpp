// The table of reduce ops: what each of them takes, and of what it is made, in one row. Checks of arguments, kernels,
// packs, the backends and the Python module's list of reduce ops read it.
//
// An op combines the elements of two ranks, and the result with those of the next. If only one rank contributes, its
// elements are copied and no kernel runs: in a group of one rank, and on the first ranks of a scan. An op that changes
// its elements therefore *prepares* them first, and another op combines them: PREMUL_SUM multiplies and is then a SUM;
// LAND maps each element to 0 or 1 and is then a BAND. Unlike in MPI, LAND gives 0 or 1 in a group of one rank, too.
//
// Every op is commutative, and associative up to the rounding of floating point; only a mean of integers has no partial
// results (dtype/partial.hpp).
//
// To add a reduce op: CONTRIBUTING.md says where. tests/native_module/test_reduce_ops.py names what is forgotten.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace procgroup {

// The numbers are those of procgroup.types.ReduceOp.
enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
  kLand,
  kLor,
  kLxor,
};
inline constexpr int kReduceOps = 12;

// What a rank does with its own elements before a call reads them.
enum class Preparation : uint8_t {
  kNone,
  kFactor,  // multiplies them
  kTruth,   // makes 1 of each but 0
};

// The kinds of dtypes that an op takes.
inline constexpr unsigned kOpaque = 0;  // moved, never reduced
inline constexpr unsigned kBools = 1;
inline constexpr unsigned kIntegers = 2;
inline constexpr unsigned kFloats = 4;
inline constexpr unsigned kComplexes = 8;
inline constexpr unsigned kBits = kBools | kIntegers;
inline constexpr unsigned kReals = kBits | kFloats;
inline constexpr unsigned kNumbers = kReals | kComplexes;

inline constexpr int kNotInNccl = -1;

struct ReduceOpRow {
  const char* name;
  unsigned takes;
  ReduceOp combines;       // the op whose kernels combine the elements: another one where they are prepared
  ReduceOp on_bools = {};  // the one of BAND, BOR and BXOR that is the same on bools
  const char* mpi = "";    // "PROD" for MPI_PROD; "" where another op's is used
  int nccl = kNotInNccl;   // ncclRedOp_t
  Preparation preparation = Preparation::kNone;
};

// By ReduceOp.
inline constexpr std::array<ReduceOpRow, kReduceOps> kReduceOpTable = {{
    {.name = "SUM", .takes = kNumbers, .combines = ReduceOp::kSum, .on_bools = ReduceOp::kBor, .mpi = "SUM", .nccl = 0},
    // The sum, divided by the number of its sources at the end.
    {.name = "AVG", .takes = kNumbers & ~kBools, .combines = ReduceOp::kAvg, .nccl = 4},
    {.name = "PRODUCT",
     .takes = kNumbers,
     .combines = ReduceOp::kProduct,
     .on_bools = ReduceOp::kBand,
     .mpi = "PROD",
     .nccl = 1},
    {.name = "MIN", .takes = kReals, .combines = ReduceOp::kMin, .on_bools = ReduceOp::kBand, .mpi = "MIN", .nccl = 3},
    {.name = "MAX", .takes = kReals, .combines = ReduceOp::kMax, .on_bools = ReduceOp::kBor, .mpi = "MAX", .nccl = 2},
    {.name = "BAND", .takes = kBits, .combines = ReduceOp::kBand, .on_bools = ReduceOp::kBand, .mpi = "BAND"},
    {.name = "BOR", .takes = kBits, .combines = ReduceOp::kBor, .on_bools = ReduceOp::kBor, .mpi = "BOR"},
    {.name = "BXOR", .takes = kBits, .combines = ReduceOp::kBxor, .on_bools = ReduceOp::kBxor, .mpi = "BXOR"},
    // NCCL multiplies, too: its operation is made for the call.
    {.name = "PREMUL_SUM",
     .takes = kFloats | kComplexes,
     .combines = ReduceOp::kSum,
     .preparation = Preparation::kFactor},
    {.name = "LAND", .takes = kBits, .combines = ReduceOp::kBand, .preparation = Preparation::kTruth},
    {.name = "LOR", .takes = kBits, .combines = ReduceOp::kBor, .preparation = Preparation::kTruth},
    {.name = "LXOR", .takes = kBits, .combines = ReduceOp::kBxor, .preparation = Preparation::kTruth},
}};

constexpr const ReduceOpRow& row_of(ReduceOp op) { return kReduceOpTable[static_cast<size_t>(op)]; }

}  // namespace procgroup
