// A request to a key-value store, as its caller sees it: over TCP (client.hpp) or in the same process
// (in_process_store.hpp). The operations and their bodies are those of protocol.hpp.
#pragma once

#include <functional>
#include <string>

#include "store/protocol.hpp"

namespace procgroup::store {

struct Reply {
  Status status = Status::kOk;
  std::string body;
};

// Called at least every 0.1 s while a request blocks, and soon after a signal; ends the request by throwing.
using Check = std::function<void()>;

}  // namespace procgroup::store
