// Calls whose bytes MPI moves, without Python between their issue and their end: see mpi/mpi_transfer.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "array_view.hpp"
#include "group/group.hpp"
#include "mpi/mpi_transfer.hpp"

namespace procgroup {

using MpiBackend = std::shared_ptr<const MpiCommunicator>;

// Let MPI move the bytes of a call. Its arrays are kept until MPI has no more use of them: for ever, if the call fails
// before; so is the memory that the function `before` of the request owns. Raises DistBackendError for more elements
// than the library can count.
void move_by_mpi(const MpiBackend& backend, const Group& group, Request& request, std::vector<ArrayView> arrays);

// The same for one array and a request that outlive this object: a blocking call allocates no memory then.
class BlockingMpiCall {
 public:
  BlockingMpiCall(const MpiBackend& backend, const Group& group, Request& request, ArrayView& array);
  BlockingMpiCall(const BlockingMpiCall&) = delete;
  BlockingMpiCall& operator=(const BlockingMpiCall&) = delete;
  ~BlockingMpiCall();

 private:
  const Request& request_;
  ArrayView& array_;
  MpiTransfer transfer_;
};

}  // namespace procgroup
