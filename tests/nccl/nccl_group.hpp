// What a thread called since the outermost ncclGroupStart, and what the process knows of its communicators.
//
// A call checks its arguments and adds its operation to the thread's group; the end of the outermost group enqueues
// one batch per communicator, and waits for the communicators that were aborted. A call outside of a group is a group
// of its own.
#pragma once

#include "nccl_communicator.hpp"

namespace stand_in::nccl {

using Comm = void*;
using Stream = void*;

// What the reason consists of becomes text only where the condition is not met.
template <class... Parts>
void require(bool condition, Status status, const Parts&... reason) {
  if (!condition) throw Refused{status, text(reason...)};
}

// Make a refusal the last error, and that of the open group; return its status.
Status refuse(const Refused& refused);

// Run the body of an API function; what it refuses becomes its result and the last error.
template <class Body>
Status guarded(const Body& body) {
  try {
    return body();
  } catch (const Refused& refused) {
    return refuse(refused);
  }
}

std::string last_error();

// Return the error that PROCGROUP_STAND_IN_NCCL_FAIL requests for this call, if any; kInProgress stands for a hang.
std::optional<Status> requested_failure(const char* call);

// How many operations read memory of a window.
extern std::atomic<int> windowed_operations;

// Communicators have numbers that are never used again, so that a destroyed one is known to be so.
Comm publish(const std::shared_ptr<Communicator>& communicator);
// Take a communicator out of those that are known.
std::shared_ptr<Communicator> take(Comm comm, const char* call);
std::shared_ptr<Communicator> find(Comm comm, const char* call);

// Find a communicator of which no operation has failed.
std::shared_ptr<Communicator> ready(Comm comm, const char* call);

void start_group();
Status end_group();
bool is_in_group();

// Refuse a call on a communicator that has operations in this thread's open group.
void require_none_in_group(const std::shared_ptr<Communicator>& communicator, const char* call);

// Abort a communicator, and wait for its GPU: at the end of the group, where one was started.
Status add_abort(const std::shared_ptr<Communicator>& communicator);

// Add an operation, and end the group unless one was started.
Status add_operation(Operation operation, Comm comm, Stream stream);

}  // namespace stand_in::nccl
