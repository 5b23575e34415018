// Staged calls: where no backend moves arrays on a device, the engine works on copies of them in host memory.
#pragma once

#include <memory>
#include <vector>

#include "array_view.hpp"
#include "backend_transfer.hpp"
#include "group/group.hpp"

namespace procgroup {

// Begin to copy what the call reads, and let the request work on host memory. It is not begun before that has been
// copied. What the call writes is copied back by the function that follow_in returns.
std::shared_ptr<BackendTransfer> stage(Request& request, const std::vector<ArrayView>& arrays, int rank,
                                       double seconds);
// The same for a message. A send waits here, for at most `seconds`, until its elements have been copied.
std::shared_ptr<BackendTransfer> stage(MessageRequest& request, const ArrayView& array, double seconds);

}  // namespace procgroup
