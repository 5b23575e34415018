// Plans for large collectives between ranks that share no memory: pure arithmetic, executed elsewhere.
//
// Vocabulary. An array of `count` elements is split into p *blocks*, one per rank, and a block into
// *segments* of at most `segment_elements`, each of which is one message. In a *round* every rank sends
// one block to the next rank of the ring and receives one from the previous; rounds overlap, segment by
// segment, so that a segment travels on as soon as it is there. Reduce-scatter runs all its rounds on one
// *column* of the blocks, a few segments of each, then on the next.
//
//   all_reduce, 3 ranks, blocks A B C           reduce-scatter                  all-gather
//     rank 0:  round 0 sends C, receives B;  round 1 sends B+, finishes A;   sends A, C; receives C, B
//     rank 1:  round 0 sends A, receives C;  round 1 sends C+, finishes B;   sends B, A; receives A, C
//     rank 2:  round 0 sends B, receives A;  round 1 sends A+, finishes C;   sends C, B; receives B, A
//
// Order of accumulation: block b starts at rank b+1 and ends at rank b: ((in[b+1] op in[b+2]) op ...) op in[b],
// ranks modulo p. It is computed once, on that one path, and then copied, so all ranks hold the same bits; but
// the order is another one for each block. What travels on the path are partial results (dtype/partial.hpp):
// float16 and bfloat16 sums travel as float32 and are rounded once, by the rank that finishes the block.
//
// The steps of a plan are issued in order; transfers then run on by themselves, and a step waits until no
// running transfer writes what it touches or reads what it writes. That cannot deadlock: ranks issue
// step k of a round in the same order, and a step only waits for transfers that both sides issue earlier.
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace procgroup {

// Where a step reads or writes; offsets are in elements of what lies there.
struct RingPlace {
  enum class Kind : uint8_t {
    kInput,
    kOutput,   // `rank`: which output of an all_gather, else 0
    kPartial,  // scratch that holds partial results
    kResult,   // scratch that holds finished elements
  };
  Kind kind = Kind::kInput;
  int32_t rank = 0;
  size_t offset = 0;
};

struct RingStep {
  enum class Kind : uint8_t {
    kSend,     // from -> peer
    kReceive,  // peer -> to
    kBegin,    // to (partial) = from
    kAdd,      // to (partial) = to op from
    kFinish,   // to = from (partial), finished
    kCopy,     // to = from
  };
  Kind kind;
  int32_t peer = -1;
  size_t elements = 0;
  RingPlace to{};
  RingPlace from{};
};

struct RingPlan {
  std::vector<RingStep> steps;
  size_t partial_elements = 0;  // how much scratch of each kind it takes
  size_t result_elements = 0;
};

struct RingRequest {
  int rank;
  int size;
  size_t count;  // elements of one rank's array
  size_t segment_elements;
  int root = -1;
};

RingPlan plan_ring_all_reduce(const RingRequest& request);
// Only the root's output is written.
RingPlan plan_ring_reduce(const RingRequest& request);
RingPlan plan_ring_all_gather(const RingRequest& request);
// A chain that begins at the root; the root reads its input, all ranks write their output.
RingPlan plan_chain_broadcast(const RingRequest& request);

}  // namespace procgroup
