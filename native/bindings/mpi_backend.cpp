#include "mpi_backend.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/native_thread.hpp"
#include "bindings.hpp"
#include "exceptions.hpp"
#include "python_host.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace procgroup {
namespace {

// Calls that failed while MPI was moving their bytes. MPI cannot be finalised then: it would wait for them.
std::atomic<int> abandoned{0};

// A transfer, and all that it uses.
struct MpiCall {
  MpiCall(const MpiBackend& backend, const Group& group, Request moved, std::vector<ArrayView> used)
      : communicator(backend),
        request(std::move(moved)),
        arrays(std::move(used)),
        transfer(*communicator, request, group.calls().reduces_in_rank_order()) {}

  const MpiBackend communicator;
  const Request request;
  const std::vector<ArrayView> arrays;
  MpiTransfer transfer;
};

void require_countable(const MpiBackend& backend, const Request& request) {
  if (!MpiTransfer::is_too_large(*backend->library, request)) return;
  raise(nb::module_::import_("procgroup.errors")
            .attr("DistBackendError")("this MPI library counts to 2**31 - 1 elements only, and the call has more of "
                                      "them. Use an MPI library with the functions of MPI 4, or several calls."));
}

// Native, so that it happens also when Python has ended.
void end_process_after(double seconds, int status, std::string text) {
  start_native_thread("pg-end", [seconds, status, text = std::move(text)] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    log_line(LogLevel::kError, text);
    _exit(status);
  }).detach();
}

using Numbers = std::map<std::string, Word>;

std::shared_ptr<MpiLibrary> make_library(const std::string& path, Word in_place, const Numbers& datatypes,
                                         const std::vector<Word>& moved, const Numbers& operations,
                                         std::vector<int> lost) {
  MpiHandles handles{.in_place = reinterpret_cast<const void*>(in_place), .lost = std::move(lost)};
  for (const auto& [name, handle] : datatypes)
    handles.datatypes[static_cast<size_t>(dtype_from_name(name.c_str()))] = handle;
  for (int code = 0; code < kReduceOps; ++code)
    if (const auto found = operations.find(reduce_op_name(static_cast<ReduceOp>(code))); found != operations.end())
      handles.operations[static_cast<size_t>(code)] = found->second;
  for (size_t place = 0; place < handles.moved.size(); ++place) handles.moved[place] = moved.at(place);
  return std::make_shared<MpiLibrary>(path, std::move(handles));
}

}  // namespace

void move_by_mpi(const MpiBackend& backend, const Group& group, Request& request, std::vector<ArrayView> arrays) {
  require_countable(backend, request);
  for (ArrayView& view : arrays) view.hold_memory();
  const std::shared_ptr<MpiCall> call(new MpiCall(backend, group, request, std::move(arrays)), [](MpiCall* ended) {
    if (!ended->transfer.is_pending()) return delete_with_lock(ended);
    ++abandoned;
  });
  request.task = std::shared_ptr<Task>(call, &call->transfer);
}

BlockingMpiCall::BlockingMpiCall(const MpiBackend& backend, const Group& group, Request& request, ArrayView& array)
    : request_(request), array_(array), transfer_(*backend, request, group.calls().reduces_in_rank_order()) {
  require_countable(backend, request);
  request.descriptor.external = true;
  request.task = std::shared_ptr<Task>(std::shared_ptr<Task>(), &transfer_);  // which owns nothing
}

BlockingMpiCall::~BlockingMpiCall() {
  if (!transfer_.is_pending()) return;
  ++abandoned;
  array_.hold_memory();
  new ArrayView(std::move(array_));
  new std::function<void()>(request_.before);  // which may own what MPI reads
  new MpiTransfer(std::move(transfer_));
}

}  // namespace procgroup

using namespace procgroup;

void bind_mpi(nb::module_& module) {
  module.def("abandoned_mpi_calls", [] { return abandoned.load(); });
  module.def("end_process_after", &end_process_after, "seconds"_a, "status"_a, "text"_a);
  nb::class_<MpiLibrary>(module, "MpiLibrary")
      .def(nb::new_(&make_library), "path"_a, "in_place"_a, "datatypes"_a, "moved"_a, "operations"_a, "lost"_a)
      .def_prop_ro("has_large_counts", &MpiLibrary::has_large_counts)
      .def("finalize", &MpiLibrary::finalize, "seconds"_a, nb::call_guard<Unlocked>());
  nb::class_<MpiCommunicator>(module, "MpiCommunicator")
      .def(nb::new_([](std::shared_ptr<MpiLibrary> library, Word handle, int rank, int size, uint64_t largest_tag) {
             return std::make_shared<MpiCommunicator>(std::move(library), handle, rank, size, largest_tag);
           }),
           "library"_a, "handle"_a, "rank"_a, "size"_a, "largest_tag"_a);
}
