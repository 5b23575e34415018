// Schedules for large collectives between ranks that share no memory: pure arithmetic, executed elsewhere.
//
// Vocabulary. What one rank has for another is a *part*; it is moved in *segments* of at most `segment_elements`, each
// of which is one message. In an *exchange* every rank sends one segment of each of its parts to the rank it is for,
// first to the next rank, then to the one after that; so no rank gets all messages at once.
//
//   gather, scatter, all_gather, all_to_all   exchanges, until the longest part is through
//   reduce_scatter                            exchanges into scratch; after each, a rank reduces what it got from all
//   all_reduce                                the array is split into a part per rank: as reduce_scatter, and what was
//                                             reduced goes to everybody in an exchange of its own
//   reduce                                    the same, but what was reduced goes to the root
//   broadcast                                 a chain that begins at the root; each rank sends on what has come
//
// Order of reduction: always that of the ranks, ((in[0] op in[1]) op in[2]) ..., by the same function that reduces in
// shared memory; so both give the same bits, and float16 and bfloat16 are rounded once. No rank sends or receives more
// than in a ring, where the order is another one for each block and each hop rounds or widens what travels.
//
// The steps of a schedule are issued in order; transfers then run on by themselves, and a step waits until no running
// transfer writes what it touches or reads what it writes. That cannot deadlock: both ends of a message issue it at
// the same place of one order (of segments, then of distances), and a step only waits for steps before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/descriptor.hpp"

namespace procgroup {

// Where a step reads or writes; offsets are in elements.
struct NetworkPlace {
  enum class Kind : uint8_t { kInput, kOutput, kScratch };
  Kind kind = Kind::kInput;
  int32_t block = 0;  // kInput, kOutput: which, where the call has one for each rank
  size_t offset = 0;
};

struct NetworkStep {
  enum class Kind : uint8_t {
    kSend,     // from -> peer
    kReceive,  // peer -> to
    kReduce,   // to = the elements of all ranks: `own` are ours, those of rank r lie at `from` + r * source_stride
    kCopy,     // to = from
  };
  Kind kind;
  int32_t peer = -1;
  size_t elements = 0;
  NetworkPlace to{};
  NetworkPlace from{};
  NetworkPlace own{};
};

struct NetworkSchedule {
  std::vector<NetworkStep> steps;
  size_t scratch_elements = 0;
  size_t source_stride = 0;
};

struct NetworkScheduleRequest {
  int rank;
  int size;
  size_t segment_elements;
  int root = -1;
  size_t count = 0;  // elements of the array; gather and scatter: of each block
  std::vector<size_t>
      inputs;  // elements by rank. reduce_scatter: of each rank's block; all_to_all: what it gets from us
  std::vector<size_t> outputs;  // elements by rank. all_gather: of each rank's block; all_to_all: what we get from it
};

// Whatever the op, the input, or this rank's input block, may be the output, or this rank's output block.
NetworkSchedule schedule_network(OpKind op, const NetworkScheduleRequest& request);

}  // namespace procgroup
