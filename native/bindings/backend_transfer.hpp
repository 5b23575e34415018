// Calls whose bytes another backend moves: a request of the engine becomes a Python function that advances the
// transfer.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "array_view.hpp"
#include "group/group.hpp"

namespace procgroup {

// The memory of a call's blocks: its arrays, and the scratch memory that the function `before` of its request owns.
struct KeptMemory {
  std::vector<ArrayView> arrays;
  std::function<void()> scratch;
};

// The transfer of one call. It keeps the call's memory for as long as the backend has it.
class BackendTransfer : public std::enable_shared_from_this<BackendTransfer> {
 public:
  BackendTransfer(nanobind::object advance, std::shared_ptr<const KeptMemory> memory)
      : advance_(std::move(advance)), memory_(std::move(memory)) {}

  // Advance without waiting; see ExternalTransfer. Throws std::runtime_error for a Python exception. From any thread,
  // one at a time, with or without the interpreter's lock.
  bool advance(int root, uint64_t number, std::vector<int>& awaited);
  ExternalTransfer as_function() {
    return [self = shared_from_this()](int root, uint64_t number, std::vector<int>& awaited) {
      return self->advance(root, number, awaited);
    };
  }
  // The exception that the backend raised, if any.
  nanobind::handle error() const { return error_; }

 private:
  nanobind::object advance_;
  std::shared_ptr<const KeptMemory> memory_;
  nanobind::object error_;
};

// Raise DistBackendError if this thread is inside a backend's transfer: the call `what` may wait there for what only
// this thread moves, or for a lock that it holds.
void require_outside_transfer(const char* what);

// A transfer without memory.
std::shared_ptr<BackendTransfer> make_transfer(nanobind::object advance);
// `prepare` is procgroup.groups.backend.prepare of a backend. It raises where the backend does not support the call.
std::shared_ptr<BackendTransfer> prepare_transfer(const nanobind::object& prepare, const Request& request,
                                                  std::vector<ArrayView> arrays, int rank);
std::shared_ptr<BackendTransfer> prepare_transfer(const nanobind::object& prepare, const MessageRequest& request,
                                                  std::vector<ArrayView> arrays);

}  // namespace procgroup
