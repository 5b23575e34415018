// From a request of a collective into the engine: which backend moves its bytes, or none, and whether its arrays are
// staged.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/preparation.hpp"
#include "python_group.hpp"

namespace procgroup {

nb::object PythonGroup::issue(Request&& request, const Options& options, ArrayView& view) {
  if (!view.is_on_device()) {
    if (only_checks_) return nb::none();
    request.source = engine_->source_line();
    if (!options.async_op && (mpi_ || !needs_backend(request))) {
      prepare(request);
      if (view.has_scratch()) move_through_scratch(request, {&view, 1});
      if (!needs_backend(request)) return run(request, options.seconds);
      const BlockingMpiCall call(mpi_, *group_, request, view);
      return run(request, options.seconds);
    }
  }
  auto issued = std::make_shared<Issued>();
  issued->arrays.push_back(std::move(view));
  return issue(std::move(request), options, std::move(issued));
}

nb::object PythonGroup::issue(Request&& request, const Options& options, std::shared_ptr<Issued> issued) {
  if (!issued->arrays.empty() && issued->arrays.front().is_on_device())
    return issue_on_device(std::move(request), options, std::move(issued));
  if (only_checks_) return nb::none();
  if (request.source == 0) request.source = engine_->source_line();
  prepare(request);
  join_blocks(request, group_->rank(), group_->size());
  move_through_scratch(request, issued->arrays);
  if (needs_backend(request) && !issued->arrays.empty()) move_by_backend(request, *issued, std::move(issued->arrays));
  if (!options.async_op) return run(request, options.seconds, issued.get());
  for (ArrayView& view : issued->arrays) view.hold_memory();
  engine_->require_not_forked();
  PythonRuntime language(engine_->rank_threads());
  return adopt(options, std::move(issued),
               [&] { return group_->calls().start(std::move(request), options.seconds, &language); });
}

void PythonGroup::move_by_backend(Request& request, Issued& issued, std::vector<ArrayView> arrays, uint64_t tag) const {
  request.descriptor.external = true;
  if (mpi_) return move_by_mpi(mpi_, *group_, request, std::move(arrays));
  issued.backend_task = prepare_task(prepare_, request, std::move(arrays), group_->rank(), group_->size(), tag);
  request.task = issued.backend_task;
}

bool PythonGroup::is_staged(const ArrayView& view, OpKind op, ReduceOp reduce_op) const {
  if (!view.is_on_device()) return false;
  return !nccl_ || !nccl_->supports(op, view.dtype(), reduce_op);
}

// NCCL's call returns when it is queued, where it has a gate. A blocking call that has none, or that is staged, is
// started as an asynchronous one and awaited.
nb::object PythonGroup::issue_on_device(Request&& request, const Options& options, std::shared_ptr<Issued> issued) {
  const Descriptor& call = request.descriptor;
  const bool is_staged = this->is_staged(issued->arrays.front(), call.op, call.reduce_op);
  if (!is_staged && options.retain)
    site(options.op)
        .refuse("`retain` is for arrays in host memory, and NCCL works in the array itself. Keep a copy of it instead");
  compare_orders(request, issued->arrays, options.op);
  if (only_checks_) return nb::none();
  if (request.source == 0) request.source = engine_->source_line();
  engine_->require_not_forked();
  if (!options.async_op) require_outside_transfer(op_name(call.op));
  ArrayStreams used = take_device_arrays(*issued, options.op, !is_staged);
  request.is_unawaited = !options.async_op;
  if (!is_staged) return issue_to_nccl(std::move(request), options, std::move(issued), std::move(used));
  const auto staged = stage(request, issued->device_arrays, used, group_->rank());
  issued->device_task = staged;
  prepare(request);
  join_blocks(request, group_->rank(), group_->size());
  staged->before_copying_back(std::exchange(request.after, {}));
  if (needs_backend(request)) {
    request.before = [staged, before = std::move(request.before)] {
      if (before) before();
    };
    move_by_backend(request, *issued, {});
    staged->let_move(std::move(request.task));
  }
  request.task = staged;
  nb::object work = adopt(options, std::move(issued), [&] {
    PythonRuntime language(engine_->rank_threads());
    return group_->calls().start(std::move(request), options.seconds, &language);
  });
  if (options.async_op) return work;
  nb::cast<Work&>(work).wait_as_blocking();
  return nb::none();
}

// Elements move in their order in memory, so all ranks need the same order: it becomes part of what they compare.
void PythonGroup::compare_orders(Request& request, const std::vector<ArrayView>& arrays, const char* op) const {
  uint64_t& compared = request.descriptor.splits;
  for (const ArrayView& view : arrays) {
    if (view.order() == 0) continue;
    const OpKind kind = request.descriptor.op;
    if (kind != OpKind::kAllReduce && kind != OpKind::kBroadcast && kind != OpKind::kReduce)
      site(op).refuse(
          "an array on a GPU is not contiguous, and only all_reduce, broadcast and reduce take one in another order. "
          "Pass a contiguous copy of it, and copy the result back");
    compared = ((compared << 1) ^ view.order()) | 1;
  }
}

ArrayStreams PythonGroup::take_device_arrays(Issued& issued, const char* op, bool can_be_captured) const {
  issued.device_arrays = keep(std::move(issued.arrays), {});
  issued.arrays.clear();
  ArrayStreams used;
  for (const ArrayView& view : issued.device_arrays->arrays)
    used.add(view.stream() ? *view.stream() : current_stream(view));
  if (!can_be_captured && are_capturing(used, issued.device_arrays->arrays.front().device()))
    site(op).refuse(
        "the stream of the array is being captured into a CUDA graph, and messages and calls that go through host "
        "memory cannot be captured. Make the call outside of the capture");
  return used;
}

nb::object PythonGroup::issue_to_nccl(Request&& request, const Options& options, std::shared_ptr<Issued> issued,
                                      ArrayStreams used) {
  const auto task = move_by_nccl(nccl_, request, issued->device_arrays, std::move(used.streams), !options.async_op);
  issued->device_task = task;
  join_blocks(request, group_->rank(), group_->size(), true);
  request.descriptor.external = request.descriptor.on_device = true;
  request.task = task;
  if (task->is_captured()) return capture(std::move(request), options, std::move(issued), task);
  bool is_queued = false;
  const auto start = [&]() -> std::shared_ptr<GroupOperation> {
    if (group_->size() == 1) {
      task->queue_later();
    } else {
      const Unlocked unlocked;  // NCCL may wait for other ranks, which may be threads of this process
      const std::lock_guard issuing(nccl_->issuing());
      if (!task->copies_out() && nccl_->has_gate()) {
        task->take_gate();
        std::shared_ptr<GroupOperation> operation = group_->calls().start(std::move(request), options.seconds);
        task->queue_behind_gate();
        is_queued = !task->has_failed();
        return operation;
      }
      task->queue_later();
    }
    PythonRuntime language(engine_->rank_threads());
    return group_->calls().start(std::move(request), options.seconds, &language);
  };
  if (options.async_op) return adopt(options, std::move(issued), start);
  begin(issued, start);
  // The only rank queues its call at once.
  const GroupOperation& operation = *issued->operation;
  is_queued =
      is_queued || (group_->size() == 1 && operation.is_completed() && operation.failure() == nullptr && task->stays());
  if (is_queued && !used.has_unordered) return nb::none();
  Work work(engine_, group_, options.op, nb::none());
  work.add(std::move(issued));
  work.wait_as_blocking();
  return nb::none();
}

// The ranks agree on the host before the call is captured: no graph has a call on which they disagree.
nb::object PythonGroup::capture(Request&& request, const Options& options, std::shared_ptr<Issued> issued,
                                const std::shared_ptr<NcclTask>& task) {
  if (!nccl_->is_connected())
    site(options.op)
        .refuse(
            "the stream of the array is being captured into a CUDA graph, and the first call of a group on a GPU "
            "cannot be captured, because it connects the ranks. Make a call before the capture");
  request.descriptor.captured = true;
  request.is_unawaited = false;
  {
    const Unlocked unlocked;
    const std::lock_guard issuing(nccl_->issuing());
    task->queue_later();
  }
  nb::object work = adopt(options, issued, [&] {
    PythonRuntime language(engine_->rank_threads());
    return group_->calls().start(std::move(request), options.seconds, &language);
  });
  nb::cast<Work&>(work).wait_as_blocking();
  const Descriptor call = issued->operation->call();
  try {
    const Unlocked unlocked;  // NCCL may wait for other ranks
    task->capture();
  } catch (const std::runtime_error& error) {
    const std::string reason = std::string("the call could not be captured: ") + error.what();
    group_->fail_call(call, reason);
    raise(nb::module_::import_("procgroup.errors").attr("DistBackendError")(reason));
  }
  group_->devices().watch_replays(call, task, options.seconds);
  engine_->sweep();  // the arrays go with the graph, which a later call need not follow
  return options.async_op ? work : nb::none();
}

NcclBackend& PythonGroup::loaded_nccl(const char* op) const {
  engine_->require_not_forked();
  require_outside_transfer(op);
  if (!nccl_) site(op).refuse("this group has no backend \"nccl\", whose memory an array on a GPU would have");
  nccl_->load();
  return *nccl_;
}

void PythonGroup::require_gpu(const char* op, const std::string& what, int device) const {
  if (!nccl_->use(device))
    site(op).refuse(what + " GPU " + std::to_string(device) + ", but this group uses GPU " +
                    std::to_string(nccl_->device()) + " on this rank");
}

nb::object PythonGroup::empty(size_t bytes, int device, double seconds) {
  NcclBackend& nccl = loaded_nccl("empty");
  require_gpu("empty", "`device` is", device);
  const std::shared_ptr<NcclMemory> memory = allocate_by_nccl(nccl, bytes);
  register_memories(OpKind::kEmpty, {memory}, seconds);
  return nb::cast(memory);
}

nb::object PythonGroup::register_mem_pool(nb::handle addresses, double seconds) {
  constexpr const char* kName = "register_mem_pool";
  loaded_nccl(kName);
  std::vector<CudaAddress> begins;
  for (const nb::handle address : addresses) begins.push_back(nb::cast<CudaAddress>(address));
  std::vector<std::shared_ptr<NcclMemory>> memories;
  try {
    memories = lent_at(begins);
  } catch (const std::invalid_argument& error) {
    site(kName).refuse(std::string("`pool`: ") + error.what());
  }
  for (const std::shared_ptr<NcclMemory>& one : memories) require_gpu(kName, "`pool` has memory of", one->device());
  std::vector<std::weak_ptr<NcclMemory>>& registered = shared_->registered;
  std::erase_if(registered, [](const auto& one) { return one.expired(); });
  std::erase_if(memories, [&](const auto& memory) {
    return std::ranges::any_of(registered, [&](const auto& one) { return one.lock() == memory; });
  });
  registered.insert(registered.end(), memories.begin(), memories.end());
  register_memories(OpKind::kRegisterMemPool, std::move(memories), seconds);
  return nb::none();
}

// The ranks agree on the sizes before NCCL's threads wait for each other.
void PythonGroup::register_memories(OpKind op, std::vector<std::shared_ptr<NcclMemory>> memories, double seconds) {
  Request request;
  request.descriptor = {.op = op, .external = true, .on_device = true};
  std::vector<Block> sizes;
  for (const std::shared_ptr<NcclMemory>& one : memories) sizes.push_back({nullptr, one->bytes()});
  for (const Block& size : sizes) request.descriptor.count += size.count;
  if (sizes.size() > 1) request.descriptor.splits = hash_of_sizes(sizes);
  request.source = engine_->source_line();
  request.task = std::make_shared<NcclRegistration>(nccl_, std::move(memories));
  {
    const Unlocked unlocked;
    const std::lock_guard issuing(nccl_->issuing());
    nccl_->add_ungated();
  }
  nb::object work = adopt({op_name(op), nb::none(), false, seconds}, std::make_shared<Issued>(), [&] {
    PythonRuntime language(engine_->rank_threads());
    return group_->calls().start(std::move(request), seconds, &language);
  });
  nb::cast<Work&>(work).wait_as_blocking();
}

nb::object PythonGroup::open_backend(nb::object start, double seconds) {
  Issued issued;
  issued.backend_task = make_python_task(std::move(start), group_->size());
  Request request;
  request.descriptor.external = true;
  request.task = issued.backend_task;
  return run(request, seconds, &issued);
}

nb::object PythonGroup::run(Request& request, double seconds, const Issued* issued) {
  engine_->require_not_forked();
  require_outside_transfer(op_name(request.descriptor.op));
  PythonRuntime language(engine_->rank_threads());
  try {
    group_->calls().run(request, seconds, language);
    language.rethrow();
  } catch (const OperationFailed& failed) {
    language.rethrow();
    raise(with_cause(build_exception(failed.failure, failed.call, *group_), issued ? issued->error() : nb::handle()));
  }
  return nb::none();
}

// Where the call cannot take iovecs, they are packed first.
nb::object PythonGroup::run_iovecs(Request& request, const InputIovecs& input, double seconds) {
  if (only_checks_) return nb::none();
  request.source = engine_->source_line();
  std::unique_ptr<std::byte[]> packed;
  if (group_->calls().takes_iovecs(request.descriptor)) {
    request.iovecs = input.iovecs();
  } else {
    packed = input.pack();
    request.input = packed.get();
    if (request.outputs.empty()) request.output = packed.get();
  }
  return run(request, seconds);
}

}  // namespace procgroup
