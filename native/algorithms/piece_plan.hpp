// Plans through slots for collectives in which ranks have pieces for each other: pieces may differ in size, also be
// empty, and lie anywhere.
//
// Vocabulary, beside that of plan.hpp. A *round* moves the next part of every piece. Where a rank has another piece
// for each other rank, its slot is divided into *lanes*, one per receiver, and a part is at most a lane.
#pragma once

#include "algorithms/plan.hpp"

namespace procgroup {

struct PiecePlanRequest {
  int rank;
  int size;
  const PieceTable& pieces;
  size_t element_bytes;
  size_t chunk_bytes;  // at most a slot
  int root = -1;
  uint64_t earlier_chunks = 0;  // of all earlier calls, see SlotPlanRequest
};

// gather, all_gather: inputs have no pieces, outputs one per rank. scatter, reduce_scatter: inputs one per rank.
void plan_gather(const PiecePlanRequest& request, Plan& plan);
void plan_all_gather(const PiecePlanRequest& request, Plan& plan);
void plan_scatter(const PiecePlanRequest& request, Plan& plan);
void plan_reduce_scatter(const PiecePlanRequest& request, Plan& plan);
void plan_all_to_all(const PiecePlanRequest& request, Plan& plan);

}  // namespace procgroup
