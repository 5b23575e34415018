// Process groups for Python: their life, their messages, and the class as Python sees it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.hpp"
#include "messages/single_copy.hpp"
#include "python_group.hpp"

using namespace nanobind::literals;

namespace procgroup {

bool PythonGroup::was_forked() const {
  try {
    engine_->require_not_forked();
  } catch (nb::python_error&) {
    return true;
  }
  return false;
}

// Groups begin and end between the passes of the progress thread, and a transfer may be a part of one: it would wait
// for itself.
PythonGroup::PythonGroup(std::shared_ptr<PythonEngine> engine, uint64_t id, std::string name, std::vector<int> members,
                         int rank, std::vector<int> hosts)
    : engine_(std::move(engine)) {
  require_outside_transfer("the making of a group");
  const size_t ranks = members.size();
  group_ = make_group(engine_->engine(), GroupOptions{.id = id,
                                                      .name = std::move(name),
                                                      .members = std::move(members),
                                                      .rank = rank,
                                                      .hosts = std::move(hosts),
                                                      .reading = ReadingRanges::for_this_processor(ranks)});
}

// Without the interpreter's lock: see make_group.
void PythonGroup::leave() {
  if (was_forked()) return;
  require_outside_transfer("the end of a group");
  const Unlocked unlocked;
  group_->leave();
}

nb::object PythonGroup::take_unraised() {
  if (was_forked()) return nb::none();
  const std::optional<OperationFailed> failed = group_->end().take_unraised();
  return failed ? build_exception(failed->failure, failed->call, *group_) : nb::none();
}

nb::object PythonGroup::lost() const {
  const std::optional<Lost> lost = group_->end().lost();
  if (!lost) return nb::none();
  const std::vector<int>& ranks = group_->members().global_ranks();
  const int rank = ranks.empty() ? lost->peer : ranks[static_cast<size_t>(lost->peer)];
  return nb::make_tuple(rank, lost->pid, lost->host, lost->reason);
}

void PythonGroup::abort() {
  if (was_forked()) return;
  const Unlocked unlocked;
  group_->abort();
}

nb::object PythonGroup::enqueue(const char* op, const nb::tuple& arguments) const {
  const auto count = static_cast<Py_ssize_t>(arguments.size());
  const nb::object given = nb::steal(PyTuple_GetSlice(arguments.ptr(), 0, count - 2));
  nb::cast<nb::list>(queue_).append(nb::make_tuple(op, given, arguments[arguments.size() - 1]));
  return arguments[arguments.size() - 2].is(nb::handle(Py_True)) ? queued_work_ : nb::none();
}

PythonGroup PythonGroup::direct() const {
  PythonGroup same = *this;
  same.intercept_.reset();
  return same;
}

PythonGroup PythonGroup::checks() const {
  PythonGroup same = direct();
  same.only_checks_ = true;
  return same;
}

void PythonGroup::handshake(const std::string& call, const nb::dict& data, double seconds) {
  engine_->require_not_forked();
  PythonRuntime language(engine_->rank_threads());
  try {
    group_->handshake(call, seconds, language, engine_->source_line());
    language.rethrow();
  } catch (const OperationFailed& failed) {
    language.rethrow();
    raise(build_exception(failed.failure, data));
  }
}

void PythonGroup::set_backend(std::shared_ptr<NcclBackend> backend) {
  nccl_ = std::move(backend);
  group_->end().on_broken([nccl = nccl_] { nccl->abort(); });
}

nb::object PythonGroup::join(const nb::list& works, const std::string& op, nb::handle arrays) const {
  Work joined(engine_, group_, op, arrays);
  joined.join(works);
  return nb::cast(std::move(joined));
}

nb::object PythonGroup::send(nb::handle array, int destination, uint64_t tag, bool async_op, double seconds) {
  ArrayView view(array, Access::kRead, {"tensor"});
  const int peer = site("send").checked_peer(destination, "destination");
  return message(OpKind::kSend, array, std::move(view), peer, tag, async_op, seconds);
}

nb::object PythonGroup::recv(nb::handle array, int source, uint64_t tag, bool async_op, double seconds) {
  ArrayView view(array, Access::kWrite, {"tensor"});
  return message(OpKind::kRecv, array, std::move(view), checked_source(source), tag, async_op, seconds);
}

int PythonGroup::checked_source(int source) const {
  if (source != kAnySource) return site("recv").checked_peer(source, "source");
  if (group_->size() == 1)
    throw nb::value_error(("Invalid source rank: group " + group_->name() +
                           " has one rank, so no other rank could send what `recv` from any rank waits for. "
                           "Receive in a group of two ranks or more.")
                              .c_str());
  return kAnySource;
}

// Nothing for a rank that is not a member, and for what is not exactly an int: their checks and errors are in Python.
std::optional<PythonGroup::Message> PythonGroup::ordinary_message(nb::handle peer, nb::handle tag) const {
  if (is_intercepted() || !PyLong_CheckExact(peer.ptr()) || !PyLong_CheckExact(tag.ptr())) return std::nullopt;
  const long long number = PyLong_AsLongLong(tag.ptr());
  const long rank = PyLong_AsLong(peer.ptr());
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // -1, too
  if (number < 0 || rank < 0) return std::nullopt;
  const std::vector<int>& ranks = group_->members().global_ranks();
  const auto found = std::ranges::find(ranks, rank);
  const long member = ranks.empty() ? rank : found - ranks.begin();
  if (member >= group_->size()) return std::nullopt;
  return Message{static_cast<int>(member), static_cast<uint64_t>(number)};
}

nb::object PythonGroup::try_send(nb::handle array, nb::handle peer, nb::handle tag, bool async_op) {
  const std::optional<Message> to = ordinary_message(peer, tag);
  return to ? send(array, to->peer, to->tag, async_op, seconds_in_force()) : nb::borrow(Py_NotImplemented);
}

nb::object PythonGroup::try_recv(nb::handle array, nb::handle peer, nb::handle tag, bool async_op) {
  const std::optional<Message> from = ordinary_message(peer, tag);
  return from ? recv(array, from->peer, from->tag, async_op, seconds_in_force()) : nb::borrow(Py_NotImplemented);
}

// The request of a collective by which a backend moves a message.
static Request as_request(const MessageRequest& message) {
  Request request;
  request.descriptor.op = message.op;
  request.descriptor.dtype = message.dtype;
  request.descriptor.count = message.count;
  request.descriptor.root = message.peer;
  request.input = request.output = message.data;
  return request;
}

nb::object PythonGroup::message(OpKind op, nb::handle array, ArrayView view, int peer, uint64_t tag, bool async_op,
                                double seconds) {
  engine_->require_not_forked();
  if (tag >> 63) throw nb::value_error("expected a tag from 0 to 2**63 - 1");
  const bool on_device = view.is_on_device();
  if (only_checks_) return nb::none();
  if (!async_op) require_outside_transfer(op_name(op));
  MessageRequest request{op, view.data(), view.count(), view.dtype(), peer, tag};
  request.source = engine_->source_line();
  if (view.has_scratch()) {
    Request copies;
    move_through_scratch(copies, {&view, 1});
    if (copies.before) copies.before();
    request.after = std::move(copies.after);
  }
  const bool is_plain = !on_device && !has_backend();
  if (async_op && is_plain)
    if (const std::optional<int> other = group_->messages().start_at_once(request))
      return nb::cast(Work(engine_, group_, op_name(op), array, *other));
  std::shared_ptr<Issued> issued;
  if (async_op || !is_plain) {
    issued = std::make_shared<Issued>();
    issued->arrays.push_back(std::move(view));
  }
  if (on_device)
    move_on_device(request, *issued, async_op, seconds);
  else if (has_backend())
    move_by_backend(request, *issued, nullptr);
  if (async_op || on_device) {
    for (ArrayView& kept : issued->arrays) kept.hold_memory();
    nb::object work = adopt({op_name(op), array, async_op, seconds}, std::move(issued),
                            [&] { return group_->messages().start(request, seconds); });
    if (async_op) return work;
    nb::cast<Work&>(work).wait_as_blocking();
    return op == OpKind::kRecv ? nb::object(nb::int_(nb::cast<Work&>(work).source())) : nb::none();
  }
  const int sender = run_message(request, seconds, issued.get());
  return op == OpKind::kRecv ? nb::object(nb::int_(sender)) : nb::none();
}

int PythonGroup::run_message(const MessageRequest& request, double seconds, const Issued* issued) {
  PythonRuntime language(engine_->rank_threads());
  try {
    const int sender = group_->messages().run(request, seconds, language);
    language.rethrow();
    return sender;
  } catch (const OperationFailed& failed) {
    language.rethrow();
    raise(with_cause(build_exception(failed.failure, failed.call, *group_), issued ? issued->error() : nb::handle()));
  }
}

void PythonGroup::move_by_backend(MessageRequest& request, Issued& issued, std::shared_ptr<StagedTask> staged) const {
  Request moved = as_request(request);
  if (staged) moved.before = [staged] {};  // which owns the memory
  move_by_backend(moved, issued, std::move(issued.arrays), request.tag);
  issued.arrays.clear();
  request.task = std::move(moved.task);
  request.external = true;
}

// A send that is staged waits here until its elements have been copied.
void PythonGroup::move_on_device(MessageRequest& request, Issued& issued, bool async_op, double seconds) const {
  const bool is_staged = this->is_staged(issued.arrays.front(), request.op);
  Request compared;
  compared.descriptor.op = request.op;
  compare_orders(compared, issued.arrays, op_name(request.op));
  const ArrayStreams used = take_device_arrays(issued, op_name(request.op), false);
  request.is_unawaited = !async_op;
  Request moved = as_request(request);
  if (!is_staged) {
    const auto task = move_by_nccl(nccl_, moved, issued.device_arrays, used.streams, !async_op);
    issued.device_task = task;
    request.task = task;
    request.external = request.on_device = true;
    return;
  }
  const auto staged = stage(moved, issued.device_arrays, used, group_->rank());
  issued.device_task = staged;
  request.data = moved.output;
  if (request.op == OpKind::kSend) {
    wait_until_copied(*staged, issued.device_arrays->arrays.front().device(), seconds);
    request.data = const_cast<void*>(moved.input);
  }
  if (has_backend()) {
    move_by_backend(request, issued, staged);
    staged->let_move(std::move(request.task));
  }
  if (has_backend() || request.op == OpKind::kRecv) request.task = staged;
}

}  // namespace procgroup

using namespace procgroup;

// Signatures are given as text for the types in them; None as an array is refused by ArrayView, which has the error
// texts.
#define PROCGROUP_METHOD(NAME, PARAMETERS, RESULT, ...)                                                   \
  def(#NAME, CallMethod<&PythonGroup::NAME>::named(#NAME), __VA_ARGS__, "async_op"_a, "timeout"_a.none(), \
      nb::sig("def " #NAME "(self, " PARAMETERS "async_op: bool, timeout: " PROCGROUP_TIMEOUT ") -> " RESULT))
#define PROCGROUP_ARRAYS "collections.abc.Sequence[object]"
#define PROCGROUP_INTEGERS "collections.abc.Sequence[int]"

namespace {

nb::list operations() {
  constexpr const char* kRanks[] = {"none", "all", "root", "all but root", "all but first"};
  constexpr const char* kArrays[] = {"none", "one", "blocks"};
  constexpr const char* kSizes[] = {"equal", "per rank", "per pair"};
  nb::list rows;
  for (const OperationRow& row : kOperationTable) {
    if (!row.is_listed) continue;
    nb::dict entry;
    entry["name"] = row.name;
    entry["givers"] = kRanks[static_cast<size_t>(row.givers)];
    entry["takers"] = kRanks[static_cast<size_t>(row.takers)];
    entry["input"] = kArrays[static_cast<size_t>(row.input)];
    entry["output"] = kArrays[static_cast<size_t>(row.output)];
    entry["sizes"] = kSizes[static_cast<size_t>(row.sizes)];
    entry["reduces"] = row.reduces;
    entry["is_message"] = row.is_message;
    rows.append(entry);
  }
  return rows;
}

// Sizes in bytes at which a collective changes its schedule, or a schedule begins another part.
nb::dict schedule_limits() {
  const GroupOptions options;
  nb::dict limits;
  nb::dict ranges;
  limits["small"] = options.layout.small_bytes;
  limits["inline"] = kInlinePayload;
  limits["chunk"] = options.layout.chunk_bytes;
  limits["slot"] = options.layout.slot_bytes;
  limits["slots"] = kSlots;
  limits["direct"] = kDirectBytes;
  limits["exchanged"] = options.exchanged_bytes;
  limits["read at a time"] = kReadInPlaceBytes;
  limits["small between hosts"] = options.limits.small_bytes;
  limits["segment"] = options.limits.segment_bytes;
  limits["eager message"] = kEagerBytes;
  limits["message read in place"] = single_copy_bytes();
  for (size_t op = 0; op < kOperations; ++op) {
    const SizeRange& range = options.reading.of(static_cast<OpKind>(op));
    ranges[kOperationTable[op].name] = nb::make_tuple(range.from, range.to);
  }
  limits["read in place"] = ranges;
  return limits;
}

}  // namespace

void bind_group(nb::module_& module) {
  module.def("operations", &operations, nb::sig("def operations() -> list[dict[str, typing.Any]]"));
  module.def("schedule_limits", &schedule_limits, nb::sig("def schedule_limits() -> dict[str, typing.Any]"));
  module.def("require_outside_transfer", &require_outside_transfer, "what"_a);
  nb::class_<PythonGroup> group(module, "Group");
  bind_collectives(group);
  group
      .def(nb::init<std::shared_ptr<PythonEngine>, uint64_t, std::string, std::vector<int>, int, std::vector<int>>(),
           "engine"_a, "identity"_a, "name"_a, "members"_a, "rank"_a, "hosts"_a)
      .def_prop_ro("offset", &PythonGroup::offset)
      .def("reduce_in_rank_order", &PythonGroup::reduce_in_rank_order)
      .def("attach", &PythonGroup::attach, "offsets"_a, "hosts"_a)
      .def("handshake", &PythonGroup::handshake, "call"_a, "data"_a, "timeout"_a,
           nb::sig("def handshake(self, call: str, data: dict[str, typing.Any], timeout: float) -> None"))
      .def_prop_ro("refused", &PythonGroup::refused)
      .def("rename_ranks", &PythonGroup::rename_ranks)
      .def("abort", &PythonGroup::abort)
      .def_prop_ro("is_broken", &PythonGroup::is_broken)
      .def_prop_ro("has_lost_member", &PythonGroup::has_lost_member)
      .def_prop_ro(
          "lost", &PythonGroup::lost, nb::sig("def lost(self) -> tuple[int, int, str, str] | None"),
          "The rank whose end broke the group: its global rank, pid, host (\"\" for this one) and a description.")
      .def_prop_ro("is_idle", &PythonGroup::is_idle)
      .def_prop_ro("last_schedule", &PythonGroup::last_schedule)
      .def("leave", &PythonGroup::leave)
      .def("take_unraised", &PythonGroup::take_unraised, nb::sig("def take_unraised(self) -> BaseException | None"),
           "Return the error of a call that no call has raised, once; None without one.")
      .def("checks", &PythonGroup::checks)
      .def("direct", &PythonGroup::direct)
      .def("intercept", &PythonGroup::intercept, "issue"_a.none(), "only_awaits"_a = false,
           nb::sig("def intercept(self, issue: collections.abc.Callable[..., typing.Any] | None, "
                   "only_awaits: bool = False) -> None"))
      .def("queue_in", &PythonGroup::queue_in, "queue"_a, "work"_a,
           nb::sig("def queue_in(self, queue: list[tuple[str, tuple[typing.Any, ...], float]], work: object) -> None"))
      .def("source_line", &PythonGroup::source_line)
      .def("allow_unknown_threads", [](const PythonGroup&) { unknown_threads_may_call = true; })
      .def("set_timeout", &PythonGroup::set_timeout, "seconds"_a)
      .def("try_send", &PythonGroup::try_send, "array"_a.none(), "peer"_a.none(), "tag"_a.none(), "async_op"_a,
           nb::sig("def try_send(self, array: object, peer: object, tag: object, async_op: bool) -> typing.Any"))
      .def("try_recv", &PythonGroup::try_recv, "array"_a.none(), "peer"_a.none(), "tag"_a.none(), "async_op"_a,
           nb::sig("def try_recv(self, array: object, peer: object, tag: object, async_op: bool) -> typing.Any"))
      .def("set_backend", nb::overload_cast<MpiBackend>(&PythonGroup::set_backend), "backend"_a)
      .def("set_backend", nb::overload_cast<std::shared_ptr<NcclBackend>>(&PythonGroup::set_backend), "backend"_a)
      .def("set_backend", nb::overload_cast<nb::object>(&PythonGroup::set_backend), "backend"_a,
           nb::sig("def set_backend(self, backend: "
                   "collections.abc.Callable[..., collections.abc.Callable[[int, int], "
                   "collections.abc.Iterator[int | collections.abc.Sequence[int] | None]]]) -> None"))
      .def("open_backend", &PythonGroup::open_backend, "start"_a, "timeout"_a,
           nb::sig("def open_backend(self, start: collections.abc.Callable[[int, int], "
                   "collections.abc.Iterator[int | collections.abc.Sequence[int] | None]], timeout: float) -> None"))
      .def("join", &PythonGroup::join, "works"_a, "op"_a, "arrays"_a,
           nb::sig("def join(self, works: list[Work], op: str, arrays: " PROCGROUP_ARRAYS ") -> Work"))
      .PROCGROUP_METHOD(all_reduce_coalesced, "arrays: " PROCGROUP_ARRAYS ", ops: " PROCGROUP_ARRAYS ", retain: bool, ",
                        "Work | None", "arrays"_a, "ops"_a, "retain"_a)
      .PROCGROUP_METHOD(all_gather_integers, "output: object, array: object, op: int, ", "Work | None",
                        "output"_a.none(), "array"_a.none(), "op"_a)
      .def("empty", CallMethod<&PythonGroup::empty>::named("empty"), "nbytes"_a, "device"_a, "timeout"_a.none(),
           nb::sig("def empty(self, nbytes: int, device: int, timeout: " PROCGROUP_TIMEOUT ") -> NcclMemory"))
      .def("register_mem_pool", CallMethod<&PythonGroup::register_mem_pool>::named("register_mem_pool"), "addresses"_a,
           "timeout"_a.none(),
           nb::sig("def register_mem_pool(self, addresses: " PROCGROUP_INTEGERS ", timeout: " PROCGROUP_TIMEOUT
                   ") -> None"))
      .def("lend_memory", &PythonGroup::lend_memory)
      .def("rank_first", CallMethod<&PythonGroup::rank_first>::named("rank_first"), "first"_a, "timeout"_a.none(),
           nb::sig("def rank_first(self, first: int, timeout: " PROCGROUP_TIMEOUT ") -> None"))
      .def("fail_rank_first", &PythonGroup::fail_rank_first, "reason"_a)
      .PROCGROUP_METHOD(send, "array: object, destination: int, tag: int, ", "Work | None", "array"_a.none(),
                        "destination"_a, "tag"_a)
      .def("broadcast_iovecs", CallMethod<&PythonGroup::broadcast_iovecs>::named("broadcast_iovecs"), "buffers"_a,
           "offsets"_a, "nbytes"_a, "timeout"_a.none(),
           nb::sig("def broadcast_iovecs(self, buffers: " PROCGROUP_ARRAYS ", offsets: " PROCGROUP_INTEGERS
                   ", nbytes: int, timeout: " PROCGROUP_TIMEOUT ") -> None"))
      .def("all_gather_iovecs", CallMethod<&PythonGroup::all_gather_iovecs>::named("all_gather_iovecs"), "outputs"_a,
           "buffers"_a, "offsets"_a, "nbytes"_a, "timeout"_a.none(),
           nb::sig("def all_gather_iovecs(self, outputs: " PROCGROUP_ARRAYS ", buffers: " PROCGROUP_ARRAYS
                   ", offsets: " PROCGROUP_INTEGERS ", nbytes: int, timeout: " PROCGROUP_TIMEOUT ") -> None"))
      .def("functional", &PythonGroup::functional, "name"_a, "tree"_a.none(), "root"_a, "source"_a, "op"_a.none(),
           "combine"_a.none(), "tag"_a,
           nb::sig("def functional(self, name: str, tree: object, root: int, source: int, op: object, "
                   "combine: collections.abc.Callable[[typing.Any, list[int]], typing.Any] | None, tag: int) "
                   "-> typing.Any"))
      .def("try_sendrecv", &PythonGroup::try_sendrecv, "tree"_a.none(), "dst"_a.none(), "src"_a.none(), "tag"_a,
           nb::sig("def try_sendrecv(self, tree: object, dst: object, src: object, tag: int) -> typing.Any"))
      .def("exchange_objects", CallMethod<&PythonGroup::exchange_objects>::named("exchange_objects"), "given"_a,
           "kind"_a, "root"_a, "count"_a, "loads"_a.none(), "wanted"_a, "timeout"_a.none(),
           nb::sig("def exchange_objects(self, given: bytes | int | collections.abc.Sequence[typing.Any], kind: int, "
                   "root: int, count: int, loads: collections.abc.Callable[[bytes], typing.Any] | None, wanted: int, "
                   "timeout: " PROCGROUP_TIMEOUT ") -> tuple[list[bytes], list[list[typing.Any]] | None, "
                   "tuple[int, int, Exception] | None] | None"))
      .def("send_objects", CallMethod<&PythonGroup::send_objects>::named("send_objects"), "given"_a, "kind"_a,
           "destination"_a, "tag"_a, "timeout"_a.none(),
           nb::sig("def send_objects(self, given: bytes | collections.abc.Sequence[typing.Any], kind: int, "
                   "destination: int, tag: int, timeout: " PROCGROUP_TIMEOUT ") -> bool"))
      .def("try_send_objects", &PythonGroup::try_send_objects, "objects"_a.none(), "kind"_a, "dst"_a.none(), "tag"_a,
           nb::sig("def try_send_objects(self, objects: object, kind: int, dst: object, tag: int) -> bool"))
      .def("recv_objects", CallMethod<&PythonGroup::recv_objects>::named("recv_objects"), "kind"_a, "count"_a,
           "source"_a, "tag"_a, "loads"_a, "timeout"_a.none(),
           nb::sig("def recv_objects(self, kind: int, count: int, source: int, tag: int, "
                   "loads: collections.abc.Callable[[bytes], typing.Any], timeout: " PROCGROUP_TIMEOUT ") -> "
                   "tuple[bytes, int, list[typing.Any] | None, tuple[int, int, Exception] | None]"))
      .PROCGROUP_METHOD(recv, "array: object, source: int, tag: int, ", "Work | int", "array"_a.none(), "source"_a,
                        "tag"_a);
}
