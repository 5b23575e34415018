#include "python_task.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

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

nb::list blocks_of(std::span<const Block> blocks, Dtype dtype, const Kept& memory) {
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

[[noreturn]] void refuse_ranks(nb::handle yielded, int size) {
  const std::string text = "Backend.move must yield ranks from 0 to " + std::to_string(size - 1) +
                           ", or None, but yielded " + nb::cast<std::string>(nb::repr(yielded));
  PyErr_SetString(PyExc_ValueError, text.c_str());
  throw nb::python_error();
}

// What a generator has yielded: a rank, several, or None.
std::vector<int> ranks_in(nb::handle yielded, int size) {
  std::vector<int> ranks;
  const auto add = [&](nb::handle one) {
    if (!PyLong_Check(one.ptr())) refuse_ranks(yielded, size);
    int overflow = 0;
    const long rank = PyLong_AsLongAndOverflow(one.ptr(), &overflow);
    if (overflow != 0 || rank < 0 || rank >= size) refuse_ranks(yielded, size);
    ranks.push_back(static_cast<int>(rank));
  };
  if (yielded.is_none()) return ranks;
  if (PyLong_Check(yielded.ptr()))
    add(yielded);
  else
    for (const nb::handle one : yielded) add(one);
  return ranks;
}

}  // namespace

Kept keep(std::vector<ArrayView> arrays, std::function<void()> scratch) {
  for (ArrayView& view : arrays) view.hold_memory();
  return {new KeptMemory(std::move(arrays), std::move(scratch)), &delete_with_lock<KeptMemory>};
}

std::span<const Block> inputs_of(const Request& request, int rank, Block& one) {
  const Descriptor& call = request.descriptor;
  if (is_message(call.op) ? call.op == OpKind::kRecv : !gives(call.op, rank, call.root)) return {};
  if (has_input_blocks(call.op)) return request.inputs;
  one = {const_cast<void*>(request.input), input_count(request, rank)};
  return {&one, 1};
}

std::span<const Block> outputs_of(const Request& request, int rank, Block& one) {
  const Descriptor& call = request.descriptor;
  if (is_message(call.op) ? call.op == OpKind::kSend : !takes(call.op, rank, call.root)) return {};
  if (has_output_blocks(call.op)) return request.outputs;
  const bool by_rank = call.splits != 0 && row_of(call.op).sizes == Sizes::kPerRank;
  one = {request.output, by_rank ? request.inputs[static_cast<size_t>(rank)].count : call.count};
  return {&one, 1};
}

bool inside_transfer() { return is_inside_transfer; }

void require_outside_transfer(const char* what) {
  if (!is_inside_transfer) return;
  const std::string text = std::string(what) + " was called inside a backend's transfer, which must not wait: yield " +
                           "wherever the backend would wait, and leave groups when the call has ended.";
  raise(nb::module_::import_("procgroup.errors").attr("DistBackendError")(text));
}

// Of an exception that ends the program, such as that of Ctrl-C: keep it for the thread that waits, for this call or
// another one, which raises it then. Whether it is kept: a thread without a frame of Python's waits for no call.
static bool keep_for_waiter(nb::handle raised) {
  if (PyObject_IsInstance(raised.ptr(), PyExc_Exception) != 0 || PyEval_GetFrame() == nullptr) return false;
  if (raised_in_transfer == nullptr) raised_in_transfer = nb::borrow(raised).release().ptr();
  return true;
}

template <class Step>
auto PythonTask::run(Step step) {
  const Relocked relocked;
  const InsideTransfer inside;
  try {
    return step();
  } catch (nb::python_error& raised) {
    fail(raised);
    throw;  // never reached: fail() throws
  }
}

void PythonTask::start(int root, uint64_t number) {
  run([&] { generator_ = nb::iter(std::exchange(start_, nb::object())(root, number)); });
}

Task::State PythonTask::test(std::vector<int>& awaited) {
  return run([&] {
    if (!generator_.is_valid()) return State::kCompleted;
    const nb::object yielded = nb::steal(PyIter_Next(generator_.ptr()));
    if (yielded.is_valid()) {
      awaited = ranks_in(yielded, size_);
      return State::kPending;
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    generator_.reset();
    return State::kCompleted;
  });
}

// A generator is closed, so that it can clean up.
void PythonTask::cancel() {
  if (Py_IsInitialized() == 0) return;
  const Relocked relocked;
  const InsideTransfer inside;
  start_.reset();
  const nb::object generator = std::exchange(generator_, nb::object());
  if (generator.is_valid() && nb::hasattr(generator, "close")) {
    try {
      generator.attr("close")();
    } catch (nb::python_error& raised) {
      if (!keep_for_waiter(raised.value())) raised.discard_as_unraisable("the end of a backend's transfer");
    }
  }
  memory_.reset();
}

void PythonTask::fail(nb::python_error& raised) {
  error_ = nb::borrow(raised.value());
  generator_.reset();
  keep_for_waiter(error_);
  const nb::object name = error_.type().attr("__name__");
  throw std::runtime_error("its backend raised " + nb::cast<std::string>(name) + ": " +
                           nb::cast<std::string>(nb::str(error_)));
}

std::shared_ptr<PythonTask> make_python_task(nb::object start, int size, Kept memory) {
  return {new PythonTask(std::move(start), size, std::move(memory)), &delete_with_lock<PythonTask>};
}

std::shared_ptr<PythonTask> prepare_task(const nb::object& prepare, const Request& request,
                                         std::vector<ArrayView> arrays, int rank, int size, uint64_t tag) {
  const Kept kept = keep(std::move(arrays), request.before);
  const Descriptor& call = request.descriptor;
  const nb::object reduce_op = reduces(call.op) ? nb::cast(reduce_op_name(call.reduce_op)) : nb::none();
  Block input, output;
  // The same for a backend, because each rank has one block for each other one.
  const OpKind moved = is_by_pair(call.op) ? OpKind::kAllToAll : call.op;
  nb::object start = prepare(op_name(moved), blocks_of(inputs_of(request, rank, input), call.dtype, kept),
                             blocks_of(outputs_of(request, rank, output), call.dtype, kept), dtype_name(call.dtype),
                             reduce_op, call.root, tag);
  return make_python_task(std::move(start), size, kept);
}

}  // namespace procgroup
