// Process groups for Python: the verbs, with views of arrays in and exceptions of procgroup.errors out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "python_engine.hpp"

using namespace nanobind::literals;

namespace procgroup {
namespace {

class PythonGroup {
 public:
  PythonGroup(std::shared_ptr<PythonEngine> engine, uint64_t id, std::string name, std::vector<int> members, int rank,
              bool shared)
      : engine_(std::move(engine)),
        group_(make_group(engine_->engine(), GroupOptions{.id = id,
                                                          .name = std::move(name),
                                                          .members = std::move(members),
                                                          .rank = rank,
                                                          .shared = shared,
                                                          .layout = {}})) {}

  uint64_t offset() const { return group_->offset(); }
  void attach(const std::vector<uint64_t>& offsets) { group_->attach(offsets); }

  nb::object all_reduce(nb::handle array, int op, bool async_op, double seconds) {
    ArrayView view(array, Access::kWrite);
    Request request = reduction(OpKind::kAllReduce, view, op, -1);
    return issue(request, async_op, seconds, view);
  }
  nb::object reduce(nb::handle array, int root, int op, bool async_op, double seconds) {
    ArrayView view(array, root == group_->rank() ? Access::kWrite : Access::kRead);
    Request request = reduction(OpKind::kReduce, view, op, checked_rank(root));
    return issue(request, async_op, seconds, view);
  }
  nb::object broadcast(nb::handle array, int root, bool async_op, double seconds) {
    ArrayView view(array, root == group_->rank() ? Access::kRead : Access::kWrite);
    Request request = make(OpKind::kBroadcast, view, checked_rank(root));
    return issue(request, async_op, seconds, view);
  }
  nb::object all_gather(nb::handle outputs, nb::handle array, bool async_op, double seconds);
  nb::object barrier(bool async_op, double seconds) {
    Request request;
    return issue(request, async_op, seconds);
  }
  nb::object send(nb::handle array, int destination, uint64_t tag, bool async_op, double seconds) {
    ArrayView view(array, Access::kRead);
    return message(OpKind::kSend, std::move(view), checked_peer(destination), tag, async_op, seconds);
  }
  nb::object recv(nb::handle array, int source, uint64_t tag, bool async_op, double seconds) {
    ArrayView view(array, Access::kWrite);
    const int peer = source == kAnySource ? kAnySource : checked_peer(source);
    return message(OpKind::kRecv, std::move(view), peer, tag, async_op, seconds);
  }
  bool is_broken() const { return group_->is_over(); }
  bool is_idle() const { return group_->is_idle(); }
  void leave() {
    if (!group_unusable()) group_->leave();
  }

 private:
  bool group_unusable() const {
    try {
      engine_->require_not_forked();
    } catch (nb::python_error&) {
      return true;
    }
    return false;
  }
  int checked_rank(int rank) const {
    if (rank >= 0 && rank < group_->size()) return rank;
    throw nb::value_error(("expected a rank from 0 to " + std::to_string(group_->size() - 1) + " of group " +
                           group_->name() + ", got " + std::to_string(rank))
                              .c_str());
  }
  int checked_peer(int peer) const {
    if (checked_rank(peer) != group_->rank()) return peer;
    throw nb::value_error(
        "Invalid destination rank: destination rank should not be the same as the rank of the current process.");
  }
  Request make(OpKind op, const ArrayView& view, int root) const {
    Request request;
    request.descriptor.op = op;
    request.descriptor.dtype = view.dtype();
    request.descriptor.count = view.count();
    request.descriptor.root = root;
    request.input = request.output = view.data();
    return request;
  }
  Request reduction(OpKind op, const ArrayView& view, int reduce_op, int root) const {
    if (reduce_op < 0 || reduce_op >= kReduceOps) throw nb::value_error("unknown reduce op");
    const auto chosen = static_cast<ReduceOp>(reduce_op);
    if (!supports(chosen, view.dtype()))
      throw nb::type_error((std::string(op_name(op)) + " on rank " + std::to_string(group_->rank()) + ": ReduceOp." +
                            reduce_op_name(chosen) + " is not defined for " + dtype_name(view.dtype()) +
                            " arrays; use another op or convert the array")
                               .c_str());
    Request request = make(op, view, root);
    request.descriptor.reduce_op = chosen;
    return request;
  }

  // The first array is the input, which may be the output of this rank as a whole; no others may share memory.
  void require_disjoint(const std::vector<ArrayView>& arrays) const {
    const auto begin = [](const ArrayView& view) { return reinterpret_cast<uintptr_t>(view.data()); };
    const auto end = [&](const ArrayView& view) { return begin(view) + view.count() * dtype_size(view.dtype()); };
    std::vector<const ArrayView*> sorted;
    for (size_t index = 0; index < arrays.size(); ++index) {
      const bool in_place = index == 0 && arrays[0].data() == arrays[static_cast<size_t>(group_->rank()) + 1].data();
      if (!in_place && arrays[index].count() != 0) sorted.push_back(&arrays[index]);
    }
    std::sort(sorted.begin(), sorted.end(), [&](auto* left, auto* right) { return begin(*left) < begin(*right); });
    for (size_t index = 1; index < sorted.size(); ++index) {
      if (begin(*sorted[index]) >= end(*sorted[index - 1])) continue;
      throw nb::value_error(("all_gather on rank " + std::to_string(group_->rank()) +
                             ": the outputs overlap with each other or with the input; pass arrays of their own"
                             " (only the output of this rank may be the input itself)")
                                .c_str());
    }
  }

  template <class... Views>
  nb::object issue(Request& request, bool async_op, double seconds, Views&... views) {
    if (async_op) {
      auto issued = std::make_shared<Issued>();
      (issued->arrays.push_back(std::move(views)), ...);
      return issue_async(std::move(request), seconds, std::move(issued));
    }
    engine_->require_not_forked();
    PythonHost host;
    try {
      group_->run(request, seconds, host);
    } catch (const OperationFailed& failed) {
      host.rethrow();
      raise(build_exception(failed.failure, failed.call, *group_));
    }
    return nb::none();
  }
  nb::object issue_async(Request request, double seconds, std::shared_ptr<Issued> issued) {
    engine_->require_not_forked();
    return adopt(std::move(issued), [&] { return group_->start(std::move(request), seconds); });
  }
  template <class Start>
  nb::object adopt(std::shared_ptr<Issued> issued, Start start) {
    issued->group = group_;
    try {
      issued->operation = start();
    } catch (const OperationFailed& failed) {
      raise(build_exception(failed.failure, failed.call, *group_));
    }
    engine_->keep(issued);
    return nb::cast(std::make_shared<PythonOperation>(engine_, std::move(issued)));
  }
  nb::object message(OpKind op, ArrayView view, int peer, uint64_t tag, bool async_op, double seconds) {
    engine_->require_not_forked();
    if (tag >> 63) throw nb::value_error("expected a tag from 0 to 2**63 - 1");
    const MessageRequest request{op, view.data(), view.count(), view.dtype(), peer, tag};
    if (async_op) {
      auto issued = std::make_shared<Issued>();
      issued->arrays.push_back(std::move(view));
      return adopt(std::move(issued), [&] { return group_->start_message(request, seconds); });
    }
    PythonHost host;
    try {
      const int source = group_->run_message(request, seconds, host);
      return op == OpKind::kRecv ? nb::object(nb::int_(source)) : nb::none();
    } catch (const OperationFailed& failed) {
      host.rethrow();
      raise(build_exception(failed.failure, failed.call, *group_));
    }
  }

  std::shared_ptr<PythonEngine> engine_;
  std::shared_ptr<Group> group_;
};

nb::object PythonGroup::all_gather(nb::handle outputs, nb::handle array, bool async_op, double seconds) {
  const nb::object list = nb::steal(PySequence_Fast(outputs.ptr(), "expected a list of arrays"));
  if (!list.is_valid()) throw nb::python_error();
  if (nb::len(list) != static_cast<size_t>(group_->size()))
    throw nb::value_error(("all_gather on rank " + std::to_string(group_->rank()) + ": expected a list of " +
                           std::to_string(group_->size()) + " arrays, one per rank, got " +
                           std::to_string(nb::len(list)))
                              .c_str());
  auto issued = std::make_shared<Issued>();
  issued->arrays.emplace_back(array, Access::kRead);
  Request request = make(OpKind::kAllGather, issued->arrays[0], -1);
  for (nb::handle output : list) {
    const ArrayView& view = issued->arrays.emplace_back(output, Access::kWrite);
    const ArrayView& input = issued->arrays[0];
    if (view.count() != input.count() || view.dtype() != input.dtype())
      throw nb::value_error(("all_gather on rank " + std::to_string(group_->rank()) + ": output " +
                             std::to_string(request.outputs.size()) + " holds " + std::to_string(view.count()) + " " +
                             dtype_name(view.dtype()) + ", expected " + std::to_string(input.count()) + " " +
                             dtype_name(input.dtype()) + " as in the input")
                                .c_str());
    request.outputs.push_back(view.data());
  }
  require_disjoint(issued->arrays);
  if (async_op) return issue_async(std::move(request), seconds, std::move(issued));
  return issue(request, false, seconds);
}

}  // namespace
}  // namespace procgroup

using namespace procgroup;

void bind_group(nb::module_& module) {
  nb::class_<PythonGroup>(module, "Group")
      .def(nb::init<std::shared_ptr<PythonEngine>, uint64_t, std::string, std::vector<int>, int, bool>(), "engine"_a,
           "identity"_a, "name"_a, "members"_a, "rank"_a, "shared"_a)
      .def_prop_ro("offset", &PythonGroup::offset)
      .def("attach", &PythonGroup::attach, "offsets"_a)
      .def_prop_ro("is_broken", &PythonGroup::is_broken)
      .def_prop_ro("is_idle", &PythonGroup::is_idle)
      .def("leave", &PythonGroup::leave)
      // Signatures are given as text for the types in them; None as an array reaches the door, which has the words.
      .def("all_reduce", &PythonGroup::all_reduce, "array"_a.none(), "op"_a, "async_op"_a, "timeout"_a,
           nb::sig("def all_reduce(self, array: object, op: int, async_op: bool, timeout: float)"
                   " -> Operation | None"))
      .def("reduce", &PythonGroup::reduce, "array"_a.none(), "root"_a, "op"_a, "async_op"_a, "timeout"_a,
           nb::sig("def reduce(self, array: object, root: int, op: int, async_op: bool, timeout: float)"
                   " -> Operation | None"))
      .def("broadcast", &PythonGroup::broadcast, "array"_a.none(), "root"_a, "async_op"_a, "timeout"_a,
           nb::sig("def broadcast(self, array: object, root: int, async_op: bool, timeout: float)"
                   " -> Operation | None"))
      .def("all_gather", &PythonGroup::all_gather, "outputs"_a.none(), "array"_a.none(), "async_op"_a, "timeout"_a,
           nb::sig("def all_gather(self, outputs: collections.abc.Sequence[object], array: object, async_op: bool,"
                   " timeout: float) -> Operation | None"))
      .def("barrier", &PythonGroup::barrier, "async_op"_a, "timeout"_a,
           nb::sig("def barrier(self, async_op: bool, timeout: float) -> Operation | None"))
      .def("send", &PythonGroup::send, "array"_a.none(), "destination"_a, "tag"_a, "async_op"_a, "timeout"_a,
           nb::sig("def send(self, array: object, destination: int, tag: int, async_op: bool,"
                   " timeout: float) -> Operation | None"))
      .def("recv", &PythonGroup::recv, "array"_a.none(), "source"_a, "tag"_a, "async_op"_a, "timeout"_a,
           nb::sig("def recv(self, array: object, source: int, tag: int, async_op: bool,"
                   " timeout: float) -> Operation | int"));
}