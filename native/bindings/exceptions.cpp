#include "exceptions.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python_host.hpp"
#include "runtime/call_report.hpp"

namespace nb = nanobind;

namespace procgroup {

namespace {

// What each of these ranks, or the first of them, called.
nb::dict by_rank(const std::vector<int>& ranks, const std::vector<std::string>& calls) {
  nb::dict found;
  for (size_t index = 0; index < calls.size(); ++index) found[nb::int_(ranks[index])] = calls[index];
  return found;
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
const char* kind_name(FailureKind kind) {
  static constexpr const char* kNames[] = {"mismatch", "timeout",     "lost",    "error",
                                           "broken",   "interrupted", "aborted", "deadlock"};
  return kNames[static_cast<size_t>(kind)];
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
  const auto* mismatch = failure.as<Mismatch>();
  const bool is_earlier = mismatch != nullptr && failure.call.sequence != 0;
  const Descriptor& call = is_earlier ? failure.call : running;
  nb::dict data;
  data["op"] = call.name();
  data["sequence"] = call.sequence;
  data["group"] = group.name();
  data["rank"] = group.rank();
  data["size"] = group.size();
  if (!group.members().global_ranks().empty()) data["members"] = nb::cast(group.members().global_ranks());
  if (takes(call.op, group.rank(), call.root)) data["intact"] = !failure.wrote;
  const Engine::CallPlace place = group.engine().place_of(call);
  data["issued_at"] = short_line(place.line);
  data["function"] = place.function;
  data["note"] = failure.note;
  if (mismatch != nullptr) data["lines"] = lines_of_ranks(group, call);
  if (mismatch != nullptr && is_by_pair(call.op)) data["pair"] = mismatch->reason;
  if (failure.is<Broken>())
    if (const std::optional<Lost> lost = group.end().lost()) data["peer"] = lost->peer;
  return build_exception(failure, std::move(data));
}

nb::object build_exception(const Failure& failure, nb::dict data) {
  const char* type = "GroupBroken";
  if (const auto* mismatch = failure.as<Mismatch>()) {
    type = "CollectiveMismatch";
    nb::dict calls;
    for (size_t rank = 0; rank < mismatch->calls.size(); ++rank)
      if (!mismatch->calls[rank].empty()) calls[nb::int_(rank)] = mismatch->calls[rank];
    data["calls"] = calls;
  } else if (const auto* timeout = failure.as<Timeout>()) {
    type = "CollectiveTimeout";
    data["missing"] = nb::cast(timeout->missing);
    std::vector<int> described(timeout->missing);  // those of the missing ranks first
    described.resize(timeout->calls.size() - std::min(timeout->calls.size(), timeout->relays.size()));
    described.insert(described.end(), timeout->relays.begin(), timeout->relays.end());
    data["calls"] = by_rank(described, timeout->calls);
    data["seconds"] = timeout->seconds;
    data["awaited"] = timeout->reason;
  } else if (const auto* lost = failure.as<Lost>()) {
    type = "PeerLost";
    data["peer"] = lost->peer;
    data["pid"] = lost->pid;
    data["host"] = lost->host;
    data["how"] = lost->reason;
    data["left"] = lost->left;
  } else if (const auto* failed = failure.as<Failed>()) {
    type = "PeerFailed";
    data["peer"] = failed->peer;
    data["reason"] = failed->reason;
    data["cause"] = kind_name(failed->cause);
    data["missing"] = nb::cast(failed->missing);
    data["seconds"] = failed->seconds;
  } else if (const auto* deadlock = failure.as<Deadlock>()) {
    type = "Deadlock";
    data["waits"] = by_rank(deadlock->ranks, deadlock->calls);
  } else {
    data["reason"] = failure.summary();
  }
  return nb::module_::import_("procgroup.errors").attr(type)(**data);
}

}  // namespace procgroup
