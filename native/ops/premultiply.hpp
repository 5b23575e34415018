// PREMUL_SUM: each rank multiplies its own elements.
#pragma once

#include "ops/request.hpp"

namespace procgroup {

// Let each of this rank's elements be multiplied into memory of the request's own, right before the call reads them.
void premultiply(Request& request);

}  // namespace procgroup
