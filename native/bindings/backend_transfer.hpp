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
  // Of a staged call: whether the host memory has the elements. Throws as advance().
  bool is_copied();
  // The exception that the backend raised, if any.
  nanobind::handle error() const { return error_; }

  // A call ends when its work on a device has started. The function `after` of its request, which lets the group follow
  // that work to its end; of a staged call, it starts that work.
  std::function<void()> follow_in(std::shared_ptr<Group> group, const Descriptor& call, double seconds,
                                  bool is_blocking);
  // Null for a call that has started none, and before the call has completed.
  const std::shared_ptr<GroupOperation>& device_work() const { return device_work_; }
  // Let the current streams of the call's arrays wait for its work on the device.
  void let_streams_wait() const;

 private:
  bool is_device_work_done();
  // Run Python code inside of the transfer.
  template <class Step>
  auto run(Step step);
  bool poll(const char* question);
  void fail(nanobind::python_error& raised);
  friend std::shared_ptr<BackendTransfer> make_staged_transfer(nanobind::object copies);

  nanobind::object advance_;
  std::shared_ptr<const KeptMemory> memory_;
  nanobind::object error_;
  nanobind::object started_;  // procgroup.groups.backend.DeviceWork
  bool is_staged_ = false;
  uint64_t number_ = 0;
  int root_ = -1;
  std::shared_ptr<GroupOperation> device_work_;
};

// The blocks that this rank gives, and that it takes.
std::vector<Block> inputs_of(const Request& request, int rank);
std::vector<Block> outputs_of(const Request& request, int rank);

// Raise DistBackendError if this thread is inside a backend's transfer: the call `what` may wait there for what only
// this thread moves, or for a lock that it holds.
void require_outside_transfer(const char* what);

// The copies of a staged call: procgroup.backends.staging.StagedCall.
std::shared_ptr<BackendTransfer> make_staged_transfer(nanobind::object copies);
// A transfer without memory.
std::shared_ptr<BackendTransfer> make_transfer(nanobind::object advance);
// `scratch` owns memory of the blocks that is not the arrays'. `prepare` is procgroup.groups.backend.prepare of a
// backend. It raises where the backend does not support the call.
std::shared_ptr<BackendTransfer> prepare_transfer(const nanobind::object& prepare, const Request& request,
                                                  std::vector<ArrayView> arrays, int rank);
std::shared_ptr<BackendTransfer> prepare_transfer(const nanobind::object& prepare, const MessageRequest& request,
                                                  std::vector<ArrayView> arrays, std::function<void()> scratch);
// The same for arrays on a device; `prepare` is procgroup.groups.backend.prepare_on_device of a backend.
std::shared_ptr<BackendTransfer> prepare_device_transfer(const nanobind::object& prepare, const Request& request,
                                                         std::vector<ArrayView> arrays, int rank);
std::shared_ptr<BackendTransfer> prepare_device_transfer(const nanobind::object& prepare, const MessageRequest& request,
                                                         std::vector<ArrayView> arrays);

}  // namespace procgroup
