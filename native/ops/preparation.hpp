// Reduce ops that prepare elements: see dtype/reduce_ops.hpp.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// Let the call read prepared elements, if its op needs such: in memory of the request's own, made right before the call
// reads them.
void prepare(Request& request);

}  // namespace procgroup
