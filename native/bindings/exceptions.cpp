#include "exceptions.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace procgroup {

namespace {

// By the ranks of `missing`.
nb::dict calls_of_ranks(const Failure& failure) {
  nb::dict calls;
  for (size_t index = 0; index < failure.calls.size(); ++index)
    calls[nb::int_(failure.missing[index])] = failure.calls[index];
  return calls;
}

// Whether the call writes to an array of this rank.
bool writes(const Descriptor& call, int rank) {
  switch (call.op) {
    case OpKind::kBarrier:
    case OpKind::kSend:
      return false;
    case OpKind::kBroadcast:
      return rank != call.root;
    case OpKind::kReduce:
    case OpKind::kGather:
      return rank == call.root;
    default:
      return true;
  }
}

}  // namespace

void raise(nb::handle exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

nb::object build_exception(const Failure& failure, const Descriptor& call, const Group& group) {
  nb::dict data;
  data["op"] = op_name(call.op);
  data["sequence"] = call.sequence;
  data["group"] = group.name();
  data["rank"] = group.rank();
  data["size"] = group.size();
  if (!group.global_ranks().empty()) data["members"] = nb::cast(group.global_ranks());
  if (writes(call, group.rank())) data["intact"] = !failure.wrote;
  if (call.op == OpKind::kAllToAll && failure.kind == Failure::Kind::kMismatch) data["pair"] = failure.reason;
  return build_exception(failure, std::move(data));
}

nb::object build_exception(const Failure& failure, nb::dict data) {
  const char* kind = "broken";
  switch (failure.kind) {
    case Failure::Kind::kMismatch: {
      kind = "mismatch";
      nb::dict calls;
      for (size_t rank = 0; rank < failure.calls.size(); ++rank) {
        if (!failure.calls[rank].empty()) calls[nb::int_(rank)] = failure.calls[rank];
      }
      data["calls"] = calls;
      break;
    }
    case Failure::Kind::kTimeout:
      kind = "timeout";
      data["missing"] = nb::cast(failure.missing);
      data["calls"] = calls_of_ranks(failure);
      data["seconds"] = failure.seconds;
      break;
    case Failure::Kind::kLost:
      kind = "lost";
      data["peer"] = failure.peer;
      data["pid"] = failure.pid;
      data["how"] = failure.reason;
      break;
    case Failure::Kind::kFailed:
      kind = "failed";
      data["peer"] = failure.peer;
      data["reason"] = failure.reason;
      break;
    case Failure::Kind::kDeadlock: {
      kind = "deadlock";
      data["waits"] = calls_of_ranks(failure);
      break;
    }
    case Failure::Kind::kBroken:
    case Failure::Kind::kInterrupted:
    case Failure::Kind::kAborted:
      data["reason"] = failure.summary();
  }
  return nb::module_::import_("procgroup.errors").attr("from_native")(kind, data);
}

}  // namespace procgroup
