// What a thread called since the outermost ncclGroupStart, and what the process knows of its communicators.
//
// A call checks its arguments and adds its operation to the thread's group; the end of the outermost group enqueues
// one batch per communicator. A call outside of a group is a group of its own.
#pragma once

#include "nccl_communicator.hpp"

namespace stand_in::nccl {

using Comm = void*;
using Stream = void*;

void require(bool condition, Status status, const std::string& reason);

// Run the body of an API function; what it refuses becomes its result and the last error.
Status guarded(const std::function<Status()>& body);

std::string last_error();

// Return the error that PROCGROUP_STAND_IN_NCCL_FAIL requests for this call, if any; kInProgress stands for a hang.
std::optional<Status> requested_failure(const std::string& call);

// Communicators have numbers that are never used again, so that a destroyed one is known to be so.
Comm publish(const std::shared_ptr<Communicator>& communicator);
void forget(Comm comm);
std::shared_ptr<Communicator> find(Comm comm, const char* call);

// Find a communicator that takes calls: the one before is complete and none has failed.
std::shared_ptr<Communicator> ready(Comm comm, const char* call);

void start_group();
Status end_group();
bool is_in_group();

// Add a communicator that is being initialised, or an operation, and end the group unless one was started.
Status add_init(const std::shared_ptr<Communicator>& communicator);
Status add_operation(Operation operation, Comm comm, Stream stream);

}  // namespace stand_in::nccl
