// Schedules for large collectives by messages alone: pure arithmetic, executed elsewhere.
//
// Vocabulary, beside that of schedule.hpp. What one rank has for another is a *block*; it is moved in *segments* of at
// most `segment_bytes`, each of which is one message. In an *exchange* every rank sends one segment of each of its
// blocks to the rank it is for, first to the next rank, then to the one after that; so no rank gets all messages at
// once.
//
//   gather, scatter, all_gather, all_to_all   exchanges, until the longest block is through
//   reduce_scatter                            exchanges into scratch; after each, a rank reduces what it got from all
//   all_reduce                                the array is split into a block per rank: as reduce_scatter, and what was
//                                             reduced goes to everybody in an exchange of its own
//   reduce                                    the same, but what was reduced goes to the root
//   broadcast                                 a chain that begins at the root; each rank sends on what has come
//
// Order of reduction: always that of the ranks, ((in[0] op in[1]) op in[2]) ..., by the same function that reduces in
// shared memory; so both give the same bits, and float16 and bfloat16 are rounded once. No rank sends or receives more
// than in a ring, where the order is another one for each block and each hop rounds or widens what travels.
#pragma once

#include <cstddef>
#include <vector>

#include "ops/descriptor.hpp"
#include "schedules/schedule.hpp"

namespace procgroup {

// Sizes are in bytes, and multiples of `element_bytes`.
struct MessageScheduleRequest {
  int rank;
  int size;
  size_t element_bytes;
  size_t segment_bytes;
  int root = -1;
  size_t bytes = 0;  // of the array; gather and scatter: of each block
  // By rank. reduce_scatter: each rank's block; all_to_all: what it gets from this rank.
  std::vector<size_t> inputs;
  // By rank. all_gather: each rank's block; all_to_all: what this rank gets from it.
  std::vector<size_t> outputs;
};

// Whatever the op, the input, or this rank's input block, may be the output, or this rank's output block.
void schedule_messages(OpKind op, const MessageScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
