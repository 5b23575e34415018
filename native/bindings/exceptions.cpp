#include "exceptions.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python_host.hpp"
#include "runtime/call_report.hpp"

namespace nb = nanobind;

namespace procgroup {

namespace {

// By the ranks of `missing` and `relays`.
nb::dict calls_of_ranks(const Failure& failure) {
  nb::dict calls;
  const size_t relayed = failure.calls.size() - std::min(failure.calls.size(), failure.relays.size());
  for (size_t index = 0; index < failure.calls.size(); ++index) {
    const int rank = index < relayed ? failure.missing[index] : failure.relays[index - relayed];
    calls[nb::int_(rank)] = failure.calls[index];
  }
  return calls;
}

// By rank, of those whose line is known.
nb::dict lines_of_ranks(const Group& group, const Descriptor& call) {
  std::vector<std::string> found;
  {
    const Unlocked unlocked;
    found = group.members().source_lines(call);
  }
  nb::dict lines;
  for (size_t rank = 0; rank < found.size(); ++rank)
    if (!found[rank].empty()) lines[nb::int_(rank)] = short_line(found[rank]);
  return lines;
}

// As PeerFailed.cause has it.
const char* kind_name(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::kMismatch:
      return "mismatch";
    case Failure::Kind::kTimeout:
      return "timeout";
    case Failure::Kind::kLost:
      return "lost";
    case Failure::Kind::kFailed:
      return "error";
    case Failure::Kind::kBroken:
      return "broken";
    case Failure::Kind::kInterrupted:
      return "interrupted";
    case Failure::Kind::kAborted:
      return "aborted";
    case Failure::Kind::kDeadlock:
      return "deadlock";
  }
  return "unknown";
}

}  // namespace

void raise(nb::handle exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

nb::object with_cause(nb::object exception, nb::handle cause) {
  if (!cause.is_valid()) return exception;
  if (PyObject_IsInstance(cause.ptr(), PyExc_Exception) == 0) return nb::borrow(cause);
  exception.attr("__cause__") = cause;
  return exception;
}

nb::object build_exception(const Failure& failure, const Descriptor& running, const Group& group) {
  // A rank may find in a later call that the ranks made different calls.
  const bool is_earlier = failure.kind == Failure::Kind::kMismatch && failure.call.sequence != 0;
  const Descriptor& call = is_earlier ? failure.call : running;
  nb::dict data;
  data["op"] = call.name();
  data["sequence"] = call.sequence;
  data["group"] = group.name();
  data["rank"] = group.rank();
  data["size"] = group.size();
  if (!group.members().global_ranks().empty()) data["members"] = nb::cast(group.members().global_ranks());
  if (takes(call.op, group.rank(), call.root)) data["intact"] = !failure.wrote;
  const Engine::Place place = group.engine().place_of(call);
  data["issued_at"] = short_line(place.line);
  data["function"] = place.function;
  data["note"] = failure.note;
  if (failure.kind == Failure::Kind::kMismatch) data["lines"] = lines_of_ranks(group, call);
  if (is_by_pair(call.op) && failure.kind == Failure::Kind::kMismatch) data["pair"] = failure.reason;
  if (failure.kind == Failure::Kind::kBroken)
    if (const std::optional<Failure> lost = group.end().lost()) data["peer"] = lost->peer;
  return build_exception(failure, std::move(data));
}

nb::object build_exception(const Failure& failure, nb::dict data) {
  const char* type = "GroupBroken";
  switch (failure.kind) {
    case Failure::Kind::kMismatch: {
      type = "CollectiveMismatch";
      nb::dict calls;
      for (size_t rank = 0; rank < failure.calls.size(); ++rank) {
        if (!failure.calls[rank].empty()) calls[nb::int_(rank)] = failure.calls[rank];
      }
      data["calls"] = calls;
      break;
    }
    case Failure::Kind::kTimeout:
      type = "CollectiveTimeout";
      data["missing"] = nb::cast(failure.missing);
      data["calls"] = calls_of_ranks(failure);
      data["seconds"] = failure.seconds;
      data["awaited"] = failure.reason;
      break;
    case Failure::Kind::kLost:
      type = "PeerLost";
      data["peer"] = failure.peer;
      data["pid"] = failure.pid;
      data["host"] = failure.host;
      data["how"] = failure.reason;
      data["left"] = failure.left;
      break;
    case Failure::Kind::kFailed:
      type = "PeerFailed";
      data["peer"] = failure.peer;
      data["reason"] = failure.reason;
      data["cause"] = kind_name(failure.cause);
      data["missing"] = nb::cast(failure.missing);
      data["seconds"] = failure.seconds;
      break;
    case Failure::Kind::kDeadlock:
      type = "Deadlock";
      data["waits"] = calls_of_ranks(failure);
      break;
    case Failure::Kind::kBroken:
    case Failure::Kind::kInterrupted:
    case Failure::Kind::kAborted:
      data["reason"] = failure.summary();
  }
  return nb::module_::import_("procgroup.errors").attr(type)(**data);
}

}  // namespace procgroup
