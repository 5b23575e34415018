// The table of operations: what each of them takes and gives, in one row. Checks of arguments, descriptors, small
// calls, schedules, errors and the Python module's list of operations read it.
//
// To add a collective: an OpKind and its row; a schedule for large arrays (collectives/choose_schedule.cpp says which);
// its binding (bindings/collectives.cpp, python_group.hpp, group.cpp). tests/native_module/test_operations.py names
// what is forgotten elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace procgroup {

enum class OpKind : uint8_t {
  kBarrier,
  kRankFirst,
  kEmpty,
  kRegisterMemPool,
  kBroadcast,
  kReduce,
  kAllReduce,
  kGather,
  kAllGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kScan,
  kExscan,
  kSend,
  kRecv,
};
inline constexpr size_t kOperations = 16;
// Tags from here to 2^63 - 1 are reserved for the messages of procgroup's own functions. No error text names them.
inline constexpr uint64_t kFirstOwnTag = (uint64_t{1} << 63) - 16;
// In the records of a rank's calls, and in its waits: the rank makes a group together with its members.
inline constexpr auto kMakesGroup = static_cast<OpKind>(kOperations);

// Which ranks give elements, or get them.
enum class Ranks : uint8_t { kNone, kAll, kRoot, kAllButRoot, kAllButFirst };

// What a rank has on one side: nothing, one array, or a block for each rank.
enum class Arrays : uint8_t { kNone, kOne, kBlocks };

// What ranks must agree on: one size; one size per rank, which all know; or, by pair, what one gives and the other
// gets.
enum class Sizes : uint8_t { kEqual, kPerRank, kPerPair };

// Of which ranks a rank's result of a reduction is made.
enum class Sources : uint8_t { kAll, kLowerAndOwn, kLower };

struct OperationRow {
  const char* name;
  Ranks givers = Ranks::kNone;
  Ranks takers = Ranks::kNone;
  Arrays input = Arrays::kNone;
  Arrays output = Arrays::kNone;
  bool reduces = false;
  Sizes sizes = Sizes::kEqual;
  Sources sources = Sources::kAll;
  bool is_message : 1 = false;  // between two ranks: neither numbered nor agreed on
  bool is_listed : 1 = true;    // among the collectives and messages; false for a call without arrays and a Work
};
static_assert(sizeof(OperationRow) == 16);  // each call reads some rows

inline constexpr bool kMoves = false;
inline constexpr bool kReduces = true;

// By OpKind.
inline constexpr std::array<OperationRow, kOperations> kOperationTable = {{
    // name, givers, takers, input, output, whether it reduces, sizes, sources
    {"barrier"},
    {.name = "rank_first", .is_listed = false},
    {.name = "empty", .is_listed = false},  // of an array on a GPU
    {.name = "register_mem_pool", .is_listed = false},
    {"broadcast", Ranks::kRoot, Ranks::kAllButRoot, Arrays::kOne, Arrays::kOne},
    {"reduce", Ranks::kAll, Ranks::kRoot, Arrays::kOne, Arrays::kOne, kReduces},
    {"all_reduce", Ranks::kAll, Ranks::kAll, Arrays::kOne, Arrays::kOne, kReduces},
    {"gather", Ranks::kAll, Ranks::kRoot, Arrays::kOne, Arrays::kBlocks},
    {"all_gather", Ranks::kAll, Ranks::kAll, Arrays::kOne, Arrays::kBlocks, kMoves, Sizes::kPerRank},
    {"scatter", Ranks::kRoot, Ranks::kAll, Arrays::kBlocks, Arrays::kOne},
    {"reduce_scatter", Ranks::kAll, Ranks::kAll, Arrays::kBlocks, Arrays::kOne, kReduces, Sizes::kPerRank},
    {"all_to_all", Ranks::kAll, Ranks::kAll, Arrays::kBlocks, Arrays::kBlocks, kMoves, Sizes::kPerPair},
    {"scan", Ranks::kAll, Ranks::kAll, Arrays::kOne, Arrays::kOne, kReduces, Sizes::kEqual, Sources::kLowerAndOwn},
    {"exscan", Ranks::kAll, Ranks::kAllButFirst, Arrays::kOne, Arrays::kOne, kReduces, Sizes::kEqual, Sources::kLower},
    {.name = "send", .givers = Ranks::kAll, .input = Arrays::kOne, .is_message = true},
    {.name = "recv", .takers = Ranks::kAll, .output = Arrays::kOne, .is_message = true},
}};

// Also of what another rank wrote: false for what is none.
constexpr bool is_operation(OpKind op) { return static_cast<size_t>(op) < kOperations; }
// What a rank may be shown to wait in: an operation, or the making of a group. Also of what another rank wrote.
constexpr bool can_wait(OpKind op) { return is_operation(op) || op == kMakesGroup; }
constexpr const OperationRow& row_of(OpKind op) { return kOperationTable[static_cast<size_t>(op)]; }

constexpr const char* op_name(OpKind op) {
  return is_operation(op) ? row_of(op).name : op == kMakesGroup ? "new_group" : "unknown operation";
}
// A barrier where no operation has that name.
constexpr OpKind op_from_name(std::string_view name) {
  for (size_t op = 0; op < kOperations; ++op)
    if (name == kOperationTable[op].name) return static_cast<OpKind>(op);
  return OpKind::kBarrier;
}
constexpr bool reduces(OpKind op) { return row_of(op).reduces; }
constexpr bool is_message(OpKind op) { return is_operation(op) && row_of(op).is_message; }
constexpr bool has_input_blocks(OpKind op) { return row_of(op).input == Arrays::kBlocks; }
constexpr bool has_output_blocks(OpKind op) { return row_of(op).output == Arrays::kBlocks; }

constexpr bool is_among(Ranks ranks, int rank, int root) {
  return ranks == Ranks::kAll || (ranks == Ranks::kRoot && rank == root) ||
         (ranks == Ranks::kAllButRoot && rank != root) || (ranks == Ranks::kAllButFirst && rank != 0);
}
constexpr bool gives(OpKind op, int rank, int root) { return is_among(row_of(op).givers, rank, root); }
// How many ranks, from the first on, a rank's result of a reduction is made of.
constexpr int sources_of(OpKind op, int rank, int size) {
  const Sources sources = row_of(op).sources;
  return sources == Sources::kAll ? size : rank + (sources == Sources::kLowerAndOwn ? 1 : 0);
}
constexpr bool takes(OpKind op, int rank, int root) { return is_among(row_of(op).takers, rank, root); }

}  // namespace procgroup
