#include "backend_transfer.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/block_counts.hpp"
#include "exceptions.hpp"
#include "python_host.hpp"

namespace nb = nanobind;

namespace procgroup {
namespace {

using Kept = std::shared_ptr<const KeptMemory>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// The bytes of a block, which keep the call's memory alive.
nb::object bytes_of(void* data, size_t bytes, const Kept& memory) {
  const nb::capsule owner(new Kept(memory), [](void* kept) noexcept { delete static_cast<Kept*>(kept); });
  return nb::cast(Bytes(data, {bytes}, owner));
}

nb::list blocks_of(const std::vector<Block>& blocks, Dtype dtype, const Kept& memory) {
  nb::list list;
  for (const Block& block : blocks) list.append(bytes_of(block.data, block.count * dtype_size(dtype), memory));
  return list;
}

constinit thread_local bool is_inside_transfer = false;

class InsideTransfer {
 public:
  InsideTransfer() { is_inside_transfer = true; }
  InsideTransfer(const InsideTransfer&) = delete;
  InsideTransfer& operator=(const InsideTransfer&) = delete;
  ~InsideTransfer() { is_inside_transfer = before_; }

 private:
  const bool before_ = is_inside_transfer;
};

// Ends with the interpreter's lock, on whatever thread; never after the interpreter.
std::shared_ptr<BackendTransfer> make_transfer_with(nb::object advance, Kept memory) {
  return {new BackendTransfer(std::move(advance), std::move(memory)), [](BackendTransfer* transfer) {
            if (Py_IsInitialized() == 0) return;
            const Relocked relocked;
            delete transfer;
          }};
}

Kept keep(std::vector<ArrayView> arrays, std::function<void()> scratch) {
  for (ArrayView& view : arrays) view.hold_memory();
  return std::make_shared<const KeptMemory>(std::move(arrays), std::move(scratch));
}

}  // namespace

std::vector<Block> inputs_of(const Request& request, int rank) {
  const Descriptor& call = request.descriptor;
  if (!gives(call.op, rank, call.root)) return {};
  if (has_input_blocks(call.op)) return request.inputs;
  return {{const_cast<void*>(request.input), input_count(request, rank)}};
}

std::vector<Block> outputs_of(const Request& request, int rank) {
  const Descriptor& call = request.descriptor;
  if (!takes(call.op, rank, call.root)) return {};
  if (has_output_blocks(call.op)) return request.outputs;
  const bool by_rank = call.splits != 0 && row_of(call.op).sizes == Sizes::kPerRank;
  return {{request.output, by_rank ? request.inputs[static_cast<size_t>(rank)].count : call.count}};
}

void require_outside_transfer(const char* what) {
  if (!is_inside_transfer) return;
  const std::string text = std::string(what) + " was called inside a backend's transfer, which must not wait: yield " +
                           "wherever the backend would wait, and leave groups when the call has ended.";
  raise(nb::module_::import_("procgroup.errors").attr("DistBackendError")(text));
}

template <class Step>
auto BackendTransfer::run(Step step) {
  const Relocked relocked;
  const InsideTransfer inside;
  try {
    return step();
  } catch (nb::python_error& raised) {
    fail(raised);
    throw;  // never reached: fail() throws
  }
}

bool BackendTransfer::advance(int root, uint64_t number, std::vector<int>& awaited) {
  return run([&] {
    const nb::object step = advance_(root, number);
    if (nb::isinstance<nb::list>(step)) {
      awaited = nb::cast<std::vector<int>>(step);
      return false;
    }
    advance_.reset();
    if (!step.is_none()) started_ = step;
    root_ = root;
    number_ = number;
    return true;
  });
}

void BackendTransfer::fail(nb::python_error& raised) {
  error_ = nb::borrow(raised.value());
  advance_.reset();
  // The call fails, and the thread that waits, for this call or another one, raises what the handler raised. A thread
  // without a frame of Python's waits for no call.
  const bool is_exit_or_interrupt = PyObject_IsInstance(error_.ptr(), PyExc_Exception) == 0;
  if (is_exit_or_interrupt && raised_in_transfer == nullptr && PyEval_GetFrame() != nullptr)
    raised_in_transfer = nb::object(error_).release().ptr();
  const nb::object name = error_.type().attr("__name__");
  throw std::runtime_error("its backend raised " + nb::cast<std::string>(name) + ": " +
                           nb::cast<std::string>(nb::str(error_)));
}

std::function<void()> BackendTransfer::follow_in(std::shared_ptr<Group> group, const Descriptor& call, double seconds,
                                                 bool is_blocking) {
  return [self = shared_from_this(), group = std::move(group), call, seconds, is_blocking] {
    if (!self->started_.is_valid()) return;
    if (self->is_staged_) self->run([&] { self->started_.attr("copy_back")(); });
    Descriptor started = call;
    started.root = self->root_;
    if (!is_message(call.op)) started.sequence = self->number_;
    self->device_work_ = group->follow(started, [self] { return self->is_device_work_done(); }, seconds, is_blocking);
  };
}

// Whoever waits for the call handles Ctrl-C.
bool BackendTransfer::poll(const char* question) {
  return run([&] {
    try {
      return nb::cast<bool>(started_.attr(question)());
    } catch (nb::python_error& raised) {
      if (!raised.matches(PyExc_KeyboardInterrupt)) throw;
      PyErr_SetInterrupt();
      return false;
    }
  });
}

bool BackendTransfer::is_device_work_done() {
  if (!poll("is_completed")) return false;
  const Relocked relocked;
  memory_.reset();
  return true;
}

bool BackendTransfer::is_copied() { return poll("is_copied"); }

void BackendTransfer::let_streams_wait() const {
  if (started_.is_valid()) started_.attr("let_streams_wait")();
}

std::shared_ptr<BackendTransfer> make_staged_transfer(nb::object copies) {
  std::shared_ptr<BackendTransfer> transfer = make_transfer_with({}, nullptr);
  transfer->started_ = std::move(copies);
  transfer->is_staged_ = true;
  return transfer;
}

std::shared_ptr<BackendTransfer> make_transfer(nb::object advance) {
  return make_transfer_with(std::move(advance), nullptr);
}

std::shared_ptr<BackendTransfer> prepare_transfer(const nb::object& prepare, const Request& request,
                                                  std::vector<ArrayView> arrays, int rank) {
  const Kept kept = keep(std::move(arrays), request.before);
  const Descriptor& call = request.descriptor;
  const nb::object reduce_op = reduces(call.op) ? nb::cast(reduce_op_name(call.reduce_op)) : nb::none();
  nb::object advance =
      prepare(op_name(call.op), blocks_of(inputs_of(request, rank), call.dtype, kept),
              blocks_of(outputs_of(request, rank), call.dtype, kept), dtype_name(call.dtype), reduce_op, call.root, 0);
  return make_transfer_with(std::move(advance), kept);
}

std::shared_ptr<BackendTransfer> prepare_transfer(const nb::object& prepare, const MessageRequest& request,
                                                  std::vector<ArrayView> arrays, std::function<void()> scratch) {
  const Kept kept = keep(std::move(arrays), std::move(scratch));
  const nb::list blocks = blocks_of({{request.data, request.count}}, request.dtype, kept);
  const bool sends = request.op == OpKind::kSend;
  nb::object advance = prepare(op_name(request.op), sends ? blocks : nb::list(), sends ? nb::list() : blocks,
                               dtype_name(request.dtype), nb::none(), request.peer, request.tag);
  return make_transfer_with(std::move(advance), kept);
}

namespace {

// The arrays of a call on a device, for what the backend must know of their libraries, and the blocks of the call.
struct DeviceArrays {
  DeviceArrays(std::vector<ArrayView> views, Dtype dtype) : size(dtype_size(dtype)) {
    for (const ArrayView& view : views) arrays.append(view.array());
    device = views.front().device();
    kept = keep(std::move(views), {});
  }

  nb::list spans(const std::vector<Block>& blocks) const {
    nb::list list;
    for (const Block& block : blocks)
      list.append(nb::make_tuple(reinterpret_cast<uintptr_t>(block.data), block.count * size));
    return list;
  }

  const size_t size;
  nb::list arrays;
  int device = 0;
  Kept kept;
};

}  // namespace

std::shared_ptr<BackendTransfer> prepare_device_transfer(const nb::object& prepare, const Request& request,
                                                         std::vector<ArrayView> arrays, int rank) {
  const Descriptor& call = request.descriptor;
  const DeviceArrays used(std::move(arrays), call.dtype);
  const bool is_coalesced = call.op == OpKind::kAllReduce && !request.inputs.empty();
  const nb::object reduce_op = reduces(call.op) ? nb::cast(reduce_op_name(call.reduce_op)) : nb::none();
  nb::object advance = prepare(op_name(call.op), used.spans(is_coalesced ? request.inputs : inputs_of(request, rank)),
                               used.spans(is_coalesced ? request.outputs : outputs_of(request, rank)),
                               dtype_name(call.dtype), reduce_op, request.factor, call.root, used.device, used.arrays);
  return make_transfer_with(std::move(advance), used.kept);
}

std::shared_ptr<BackendTransfer> prepare_device_transfer(const nb::object& prepare, const MessageRequest& request,
                                                         std::vector<ArrayView> arrays) {
  const DeviceArrays used(std::move(arrays), request.dtype);
  const nb::list blocks = used.spans({{request.data, request.count}});
  const bool sends = request.op == OpKind::kSend;
  nb::object advance = prepare(op_name(request.op), sends ? blocks : nb::list(), sends ? nb::list() : blocks,
                               dtype_name(request.dtype), nb::none(), 1.0, request.peer, used.device, used.arrays);
  return make_transfer_with(std::move(advance), used.kept);
}

}  // namespace procgroup
