#include "work.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.hpp"
#include "exceptions.hpp"
#include "timeouts.hpp"

using namespace nanobind::literals;

namespace procgroup {

namespace {

// A list as a copy, which the caller cannot change; one array as it is: most Works are never asked for it.
nb::object keep(nb::handle arrays) {
  if (arrays.is_none()) return nb::list();
  const bool several = PyTuple_Check(arrays.ptr()) || PyList_Check(arrays.ptr());
  return several ? nb::list(arrays) : nb::borrow(arrays);
}

// Raises without a Python frame: the text of an error in C++ code, into which others turn it, has a line for each
// frame.
class Outcome {
 public:
  explicit Outcome(nb::object get) : get_(std::move(get)) {}

  nb::object result(const nb::args&) const {
    nb::object found = get_();
    if (PyExceptionInstance_Check(found.ptr()) == 0) return found;
    found.attr("__traceback__") = nb::none();
    raise(found);
  }

 private:
  nb::object get_;
};

}  // namespace

Work::Work(std::shared_ptr<PythonEngine> engine, std::shared_ptr<Group> group, std::string op, nb::handle arrays,
           int source)
    : engine_(std::move(engine)),
      group_(std::move(group)),
      op_(std::move(op)),
      source_(source),
      arrays_(keep(arrays)) {}

void Work::join(const nb::list& works) {
  op_ += "_coalesced";
  for (const nb::handle work : works) {
    const auto& one = nb::cast<const Work&>(work);
    issued_.insert(issued_.end(), one.issued_.begin(), one.issued_.end());
  }
}

std::string Work::where() const {
  return "group " + group_->name() + " (rank " + std::to_string(group_->rank()) + " of " +
         std::to_string(group_->size()) + ")";
}

// A call that ends by its own deadline before the one of the context raises what that deadline raises.
bool Work::wait(nb::handle timeout) {
  const double seconds = timeout.is_none() ? context_seconds().value_or(0) : seconds_of(timeout);
  const Deadline deadline = seconds == 0 ? Deadline::never() : Deadline::after(seconds);
  const auto ends_earlier = [&](const Issued& issued) {
    return timeout.is_none() && issued.operation->deadline().at_ns <= deadline.at_ns;
  };
  for (const std::shared_ptr<Issued>& issued : issued_)
    if (!wait_for(*issued, ends_earlier(*issued) ? Deadline::never() : deadline))
      raise(nb::module_::import_("procgroup.errors")
                .attr("WaitTimeout")("op"_a = op_, "where"_a = where(), "seconds"_a = seconds));
  return true;
}

void Work::wait_as_blocking() {
  try {
    wait(nb::none());
  } catch (nb::python_error&) {
    PythonRuntime language(engine_->rank_threads());
    for (const std::shared_ptr<Issued>& issued : issued_)
      if (!issued->operation->is_completed()) group_->calls().end_interrupted(*issued->operation, language);
    throw;
  }
}

// Whether it completed in time. Raises its error.
bool Work::wait_for(const Issued& issued, Deadline deadline) const {
  return wait_for(issued, *issued.operation, deadline) && let_streams_wait(issued, deadline);
}

bool Work::wait_for(const Issued& issued, GroupOperation& operation, Deadline deadline) const {
  if (!operation.is_completed()) require_outside_transfer("wait");
  engine_->require_not_forked();
  PythonRuntime language(engine_->rank_threads());
  const CallQueue::Outcome outcome = group_->calls().await(operation, deadline, language);
  language.rethrow();
  if (!outcome.has_completed) return false;
  const Failure* const failure = outcome.failure ? &*outcome.failure : issued.failure();  // of its work on a device
  if (failure != nullptr) {
    const OperationFailed failed = group_->end().reported(*failure, issued.operation->call());
    raise(with_cause(build_exception(failed.failure, failed.call, *group_), issued.error()));
  }
  return true;
}

// Let the streams on which the arrays are used wait for the work on a device; the host, where a library states none.
bool Work::let_streams_wait(const Issued& issued, Deadline deadline) const {
  const std::shared_ptr<GroupOperation>& work = issued.operation->device_work();
  const bool is_captured = issued.device_task && issued.operation->call().captured;
  if (!is_captured && (!work || work->is_completed())) return true;
  const ArrayStreams used = let_current_streams_wait(issued);
  return is_captured || !used.has_unordered || wait_for(issued, *work, deadline);
}

ArrayStreams Work::let_current_streams_wait(const Issued& issued) const {
  ArrayStreams used = current_streams(issued.device_arrays->arrays);
  issued.device_task->let_wait(used.streams);
  return used;
}

// A caller that takes the stream does not wait for the call: a later call raises its error.
CudaStream Work::stream() const {
  CudaStream found = nullptr;
  for (const std::shared_ptr<Issued>& issued : issued_) {
    const CudaStream stream = issued->device_task ? issued->device_task->queued_on() : nullptr;
    if (stream == nullptr || (found != nullptr && found != stream)) return nullptr;
    issued->operation->set_unawaited();
    if (issued->failure() != nullptr) return nullptr;
    found = stream;
  }
  return found;
}

void Work::block_current_stream() {
  if (stream() == nullptr || engine_->forked()) {
    wait(nb::none());
    return;
  }
  for (const std::shared_ptr<Issued>& issued : issued_)
    if (let_current_streams_wait(*issued).has_unordered) wait(nb::none());
}

// To look advances a backend's transfer, too, and a signal handler may raise inside of it: here, not in a later call.
bool Work::is_completed() const {
  const bool completed =
      std::ranges::all_of(issued_, [&](const std::shared_ptr<Issued>& issued) { return is_completed(*issued); });
  raise_what_a_transfer_raised();
  return completed;
}

bool Work::is_completed(const Issued& issued) const {
  if (engine_->forked()) return true;
  if (!issued.operation->is_completed() && issued.operation->help() != Progress::kDone) return false;
  const std::shared_ptr<GroupOperation>& work = issued.operation->device_work();
  if (!work) return true;
  Progress progress = work->help();
  while (progress == Progress::kMoved) {  // the thread that looks may need the interpreter's lock
    const nb::gil_scoped_release unlocked;
    progress = work->help();
  }
  return progress == Progress::kDone;
}

nb::object Work::exception() const {
  for (const std::shared_ptr<Issued>& issued : issued_)
    if (nb::object error = exception(*issued); !error.is_none()) return error;
  return nb::none();
}

nb::object Work::exception(const Issued& issued) const {
  if (!issued.is_completed() && engine_->forked()) return PythonEngine::forked_error();
  const Failure* failure = issued.failure();
  return failure == nullptr ? nb::none() : exception(issued, *failure);
}

nb::object Work::exception(const Issued& issued, const Failure& failure) const {
  group_->end().set_reported(issued.operation->call());
  return with_cause(build_exception(failure, issued.operation->call(), *group_), issued.error());
}

// Work on a device need not have ended: whoever uses the arrays comes after it, by wait().
nb::object Work::result() {
  const bool has_started = std::ranges::all_of(
      issued_, [](const std::shared_ptr<Issued>& issued) { return issued->operation->is_completed(); });
  if (!has_started && !is_completed())
    throw std::runtime_error(op_ + " on " + where() + " has not completed; call wait() before result().");
  if (const nb::object error = exception(); !error.is_none()) raise(error);
  if (!PyList_Check(arrays_.ptr())) {
    nb::list list;
    list.append(arrays_);
    arrays_ = std::move(list);
  }
  return arrays_;
}

int Work::source() const { return issued_.empty() ? source_ : issued_.front()->operation->source(); }

int Work::source_rank() {
  if (op_ != op_name(OpKind::kRecv))
    throw std::runtime_error(
        "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call.");
  result();
  const int source = this->source();
  const std::vector<int>& ranks = group_->members().global_ranks();
  return ranks.empty() ? source : ranks[static_cast<size_t>(source)];
}

std::string Work::describe() const {
  const char* state = !is_completed() ? "running" : is_success() ? "complete" : "failed";
  return "<Work " + op_ + " on " + where() + ": " + state + ">";
}

nb::object Work::get_future(nb::handle self) {
  auto& work = nb::cast<Work&>(self);
  if (work.future_.is_valid()) return work.future_;
  nb::object future = nb::module_::import_("procgroup.groups.future").attr("Future")();
  future.attr("set_running_or_notify_cancel")();
  if (work.future_.is_valid()) return work.future_;  // another thread came first, while Python made this one
  work.future_ = future;
  work.on_completion(nb::cpp_function([kept = nb::borrow(self)] { nb::cast<Work&>(kept).complete_future(); }));
  return future;
}

void Work::complete_future() {
  const nb::object future = std::exchange(future_, nb::object());
  const nb::object error = exception();
  if (error.is_none())
    future.attr("set_result")(result());
  else
    future.attr("set_exception")(error);
}

// Call `callback` once all operations have completed: from the completion thread, or at once. One callback at most.
void Work::on_completion(nb::object callback) const {
  const auto running = std::make_shared<size_t>(issued_.size() + 1);  // with one more until all are watched
  const auto complete_one = [callback = std::move(callback), running] {
    if (--*running == 0) callback();
  };
  for (const std::shared_ptr<Issued>& issued : issued_) {
    if (is_completed(*issued)) {
      --*running;
      continue;
    }
    issued->callback = nb::cpp_function(complete_one);
    OwnThreads::of_process().add_tasks(1);
    issued->operation->watch();
    engine_->watch();
    // It may have completed in between: then no completion will be counted for it any more.
    if (is_completed(*issued)) engine_->engine()->completed();
  }
  complete_one();
}

}  // namespace procgroup

using namespace procgroup;

void bind_work(nb::module_& module) {
  nb::class_<Outcome>(module, "Outcome",
                      "Called with anything, returns what ``get`` returns, or raises it: see work.cpp.")
      .def(nb::init<nb::object>(), "get"_a,
           nb::sig("def __init__(self, get: collections.abc.Callable[[], typing.Any]) -> None"))
      .def("__call__", &Outcome::result, nb::sig("def __call__(self, *ignored: typing.Any) -> typing.Any"));
  nb::class_<Work>(module, "Work",
                   "A call that was issued with ``async_op=True``. Do not use its arrays before ``wait`` returns.")
      .def_prop_ro("op", &Work::op)
      .def("wait", &Work::wait, "timeout"_a = nb::none(),
           nb::sig("def wait(self, timeout: datetime.timedelta | float | None = None) -> bool"),
           R"(Wait until the call has completed and return True.

``timeout`` is a timedelta or seconds; None or zero means the call's own deadline. Raises the call's error if it
failed, and WaitTimeout if ``timeout`` passed first: the call then goes on.)")
      .def(
          "is_completed", [](const Work& self) { return self.is_completed(); },
          "Return whether the call has completed, with or without an error. Does not wait.")
      .def("is_success", &Work::is_success, "Return whether the call has completed without an error.")
      .def(
          "exception", [](const Work& self) { return self.exception(); },
          nb::sig("def exception(self) -> BaseException | None"),
          "Return the error of a failed call; None while it runs and when it succeeded.")
      .def("result", &Work::result, nb::sig("def result(self) -> list[typing.Any]"),
           "Return the call's arrays. Raises RuntimeError while it runs, and its error if it failed.")
      .def(
          "get_future", [](nb::handle self) { return Work::get_future(self); },
          nb::sig("def get_future(self) -> procgroup.groups.future.Future"),
          R"(Return a future of ``result()``, completed by a thread of the backend. Cancelling it has no effect.

It has the methods of ``torch.futures.Future`` and of ``concurrent.futures.Future``.)")
      .def(
          "synchronize", [](Work& self) { self.wait(nb::none()); },
          "Wait until the call has completed, as ``wait()`` does.")
      .def("block_current_stream", &Work::block_current_stream,
           R"(Let the streams on which the call's arrays are used now wait for it.

A call that is queued on a GPU lets the host go on; ``wait`` and the next call raise its error.
Otherwise this is ``wait()``.)")
      .def_prop_ro(
          "stream",
          [](const Work& self) -> nb::object {
            const CudaStream stream = self.stream();
            if (stream == nullptr) return nb::none();
            return nb::int_(reinterpret_cast<uintptr_t>(stream));
          },
          nb::sig("def stream(self) -> int | None"),
          R"(The handle of the stream of a GPU on which the call is queued.

A later call raises its error then, or the end of the group. None before it is queued, for a call that several
streams make, and on arrays in host memory.)")
      .def("source_rank", &Work::source_rank,
           R"(Return the global rank of the sender of a completed receive.

Raises RuntimeError for other calls.)")
      .def("_source_rank", &Work::source_rank)
      .def("__repr__", &Work::describe);
}
