// What a caller asks for: the call and the arrays, as addresses. Arrays outlive the operation.
#pragma once

#include <vector>

#include "transport/descriptor.hpp"

namespace procgroup {

struct Request {
  Descriptor descriptor;        // group and sequence are filled in when the call starts
  const void* input = nullptr;  // this rank's elements; may be the same address as the output
  void* output = nullptr;       // not all_gather
  std::vector<void*> outputs;   // all_gather: one per rank, in rank order
};

}  // namespace procgroup
