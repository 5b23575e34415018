// From a request of a collective into the engine: which backend moves its bytes, or none, and whether its arrays are
// staged.
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "dtype/scale.hpp"
#include "python_group.hpp"
#include "staged_call.hpp"

namespace procgroup {
namespace {

// Let each of this rank's elements be multiplied into memory of the request's own, right before the call reads them.
void premultiply(Request& request) {
  std::vector<Block> from = request.inputs;
  if (from.empty()) from.push_back({const_cast<void*>(request.input), request.descriptor.count});
  const Dtype dtype = request.descriptor.dtype;
  size_t count = 0;
  for (const Block& block : from) count += block.count;
  const std::shared_ptr<std::byte[]> scaled(new std::byte[count * dtype_size(dtype)]);
  std::byte* at = scaled.get();
  for (Block& block : request.inputs) {
    block.data = at;
    at += block.count * dtype_size(dtype);
  }
  if (request.inputs.empty()) request.input = scaled.get();
  request.before = [before = std::move(request.before), from = std::move(from), scaled, dtype,
                    factor = request.factor] {
    if (before) before();
    std::byte* to = scaled.get();
    for (const Block& block : from) {
      scale(dtype, to, block.data, factor, block.count);
      to += block.count * dtype_size(dtype);
    }
  };
}

}  // namespace

nb::object PythonGroup::issue(Request request, const Options& options, ArrayView& view) {
  if (view.is_on_device()) {
    auto issued = std::make_shared<Issued>();
    issued->arrays.push_back(std::move(view));
    return issue(std::move(request), options, std::move(issued));
  }
  if (only_checks_) return nb::none();
  request.source = engine_->source_line();
  if (!options.async_op && (mpi_ || !needs_backend(request))) {
    if (request.factor != 1.0) premultiply(request);
    if (view.has_scratch()) move_through_scratch(request, {&view, 1});
    if (!needs_backend(request)) return run(request, options.seconds);
    const BlockingMpiCall call(mpi_, *group_, request, view);
    return run(request, options.seconds);
  }
  auto issued = std::make_shared<Issued>();
  issued->arrays.push_back(std::move(view));
  return issue(std::move(request), options, std::move(issued));
}

nb::object PythonGroup::issue(Request request, const Options& options, std::shared_ptr<Issued> issued) {
  const Descriptor& call = request.descriptor;
  const bool is_staged = !issued->arrays.empty() && this->is_staged(issued->arrays.front(), call.op, call.reduce_op);
  const bool on_device = !issued->arrays.empty() && issued->arrays.front().is_on_device() && !is_staged;
  if (on_device && options.retain)
    site(options.op)
        .refuse("`retain` is for arrays in host memory, and NCCL works in the array itself. Keep a copy of it instead");
  if (only_checks_) return nb::none();
  if (request.source == 0) request.source = engine_->source_line();
  if (is_staged) {
    engine_->require_not_forked();
    issued->staged = stage(request, issued->arrays, group_->rank(), options.seconds);
    request.after = issued->staged->follow_in(group_, call, options.seconds, !options.async_op);
  }
  if (request.factor != 1.0 && !on_device) premultiply(request);  // a backend on a device has its own way
  move_through_scratch(request, issued->arrays);
  if (on_device)
    move_on_device(request, *issued, options);
  else if (needs_backend(request) && !issued->arrays.empty())
    move_by_backend(request, *issued);
  if (!options.async_op) {
    run(request, options.seconds, issued.get());
    if (is_staged || on_device) issued->on_device()->let_streams_wait();
    return nb::none();
  }
  for (ArrayView& view : issued->arrays) view.hold_memory();
  engine_->require_not_forked();
  PythonRuntime language(engine_->rank_threads());
  return adopt(options, std::move(issued),
               [&] { return group_->start(std::move(request), options.seconds, language); });
}

void PythonGroup::move_by_backend(Request& request, Issued& issued) const {
  request.descriptor.external = true;
  if (mpi_) return move_by_mpi(mpi_, *group_, request, std::move(issued.arrays));
  issued.transfer = prepare_transfer(prepare_, request, std::move(issued.arrays), group_->rank());
  request.transfer = issued.transfer->as_function();
}

bool PythonGroup::is_staged(const ArrayView& view, OpKind op, ReduceOp reduce_op) const {
  if (!view.is_on_device()) return false;
  const char* const reduction = reduces(op) ? reduce_op_name(reduce_op) : "";
  if (device_supports_.is_valid() && nb::cast<bool>(device_supports_(op_name(op), dtype_name(view.dtype()), reduction)))
    return false;
  if (!nb::cast<bool>(nb::module_::import_("procgroup.backends.staging").attr("is_available")())) view.refuse_device();
  return true;
}

void PythonGroup::move_on_device(Request& request, Issued& issued, const Options& options) const {
  request.descriptor.external = request.descriptor.on_device = true;
  issued.transfer = prepare_device_transfer(device_prepare_, request, std::move(issued.arrays), group_->rank());
  request.transfer = issued.transfer->as_function();
  request.after = issued.transfer->follow_in(group_, request.descriptor, options.seconds, !options.async_op);
}

void PythonGroup::open_backend(nb::object advance, double seconds) {
  Issued issued;
  issued.transfer = make_transfer(std::move(advance));
  Request request;
  request.descriptor.external = true;
  request.transfer = issued.transfer->as_function();
  run(request, seconds, &issued);
}

nb::object PythonGroup::run(Request& request, double seconds, const Issued* issued) {
  engine_->require_not_forked();
  require_outside_transfer(op_name(request.descriptor.op));
  PythonRuntime language(engine_->rank_threads());
  try {
    group_->run(request, seconds, language);
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
  if (group_->takes_iovecs(request.descriptor)) {
    request.iovecs = input.iovecs();
  } else {
    packed = input.pack();
    request.input = packed.get();
    if (request.outputs.empty()) request.output = packed.get();
  }
  return run(request, seconds);
}

}  // namespace procgroup
