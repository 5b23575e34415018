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

#include "schedules/schedule.hpp"

namespace procgroup {

// Whatever the op, the input, or this rank's input block, may be the output, or this rank's output block.
void schedule_messages(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
