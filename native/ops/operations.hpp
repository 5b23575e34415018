// Questions about operations, which their table answers: checks of arguments, descriptors, small calls, schedules and
// errors ask them.
//
// To add a collective: a row in tools/operations.py; a schedule for large arrays (collectives/choose_schedule.cpp
// has the list); its method (bindings/collectives.cpp). tests/native_module/test_operations.py names the places that a
// row still lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ops/operation_table.hpp"

namespace procgroup {

// Tags from here to 2^63 - 1 are reserved for the messages of procgroup's own functions. No error text names them.
inline constexpr uint64_t kFirstOwnTag = (uint64_t{1} << 63) - 16;
// In the records of a rank's calls, and in its waits: the rank makes a group together with its members.
inline constexpr auto kMakesGroup = static_cast<OpKind>(kOperations);

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
// Whether only the two ranks of a pair know how much one gives to the other. Also of what another rank wrote.
constexpr bool is_by_pair(OpKind op) { return is_operation(op) && row_of(op).sizes == Sizes::kPerPair; }
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
