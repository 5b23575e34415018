// From the arguments of each collective to a request, after all checks.
#include <algorithm>
#include <numeric>

#include "ops/packing.hpp"
#include "python_group.hpp"

using namespace nanobind::literals;

namespace procgroup {
namespace {

Request make(OpKind op, Dtype dtype, size_t count, int root = -1) {
  Request request;
  request.descriptor.op = op;
  request.descriptor.dtype = dtype;
  request.descriptor.count = count;
  request.descriptor.root = root;
  return request;
}

// A request that works on one array.
Request make(OpKind op, const ArrayView& view, int root = -1) {
  Request request = make(op, view.dtype(), view.count(), root);
  request.input = request.output = view.data();
  return request;
}

void reduce_with(Request& request, const Reduction& reduction) {
  request.descriptor.reduce_op = reduction.op;
  request.factor = reduction.factor;
}

// Describe blocks of which every rank has the same: by one size, or by the sum and a hash of the sizes.
void describe_blocks(Descriptor& call, const std::vector<Block>& blocks) {
  const auto differs = [&](const Block& block) { return block.count != blocks[0].count; };
  if (std::ranges::none_of(blocks, differs)) {
    call.count = blocks[0].count;
    return;
  }
  call.count = 0;
  for (const Block& block : blocks) call.count += block.count;
  call.splits = hash_of_sizes(blocks);
}

std::string elements(size_t count, Dtype dtype) { return std::to_string(count) + " " + dtype_name(dtype); }

// Each of the blocks of a list is as large as the array.
void require_equal(const CallSite& site, const std::vector<Block>& blocks, const char* name, const ArrayView& view,
                   const char* array) {
  for (size_t index = 0; index < blocks.size(); ++index)
    if (blocks[index].count != view.count())
      site.refuse("`" + ParameterName{name, static_cast<int>(index)}.text() + "` holds " +
                  elements(blocks[index].count, view.dtype()) + ", expected " + elements(view.count(), view.dtype()) +
                  " as in `" + array + "`");
}

// This rank's block of a list is as large as its array.
void require_own(const CallSite& site, const std::vector<Block>& blocks, const char* name, const ArrayView& view,
                 const char* array) {
  const size_t count = blocks[static_cast<size_t>(site.rank())].count;
  if (count == view.count()) return;
  site.refuse("`" + ParameterName{name, site.rank()}.text() + "`, which is this rank's, holds " +
              elements(count, view.dtype()) + ", expected " + elements(view.count(), view.dtype()) + " as in `" +
              array + "`");
}

void require_blocks(const CallSite& site, const ArrayView& whole, const char* name, const ArrayView& part,
                    const char* block_name) {
  const size_t expected = part.count() * static_cast<size_t>(site.size());
  if (whole.count() == expected) return;
  site.refuse("`" + std::string(name) + "` holds " + elements(whole.count(), whole.dtype()) + ", expected " +
              std::to_string(expected) + ": " + std::to_string(part.count()) + ", as `" + block_name +
              "` has, for each of " + std::to_string(site.size()) + " ranks");
}

// What a rank gives to itself is as large as what it gets there.
void require_same_count(const CallSite& site, const Block& input, int input_index, const Block& output,
                        int output_index) {
  if (input.count == output.count) return;
  site.refuse("`" + ParameterName{"input_tensor_list", input_index}.text() +
              "`, which this rank gives to itself, has " + std::to_string(input.count) + " elements, but `" +
              ParameterName{"output_tensor_list", output_index}.text() + "` has " + std::to_string(output.count));
}

Block block_of(const ArrayView& view) { return {view.data(), view.count()}; }

// The blocks for a rank's neighbours: for each rank its first array, then for each its second one, and so on.
class NeighborBlocks {
 public:
  explicit NeighborBlocks(int size) : size_(static_cast<size_t>(size)), blocks_(size_), arrays_(size_) {}

  void add(int peer, const ArrayView& view) {
    const auto rank = static_cast<size_t>(peer);
    last_ = size_ * arrays_[rank]++ + rank;
    if (last_ >= blocks_.size()) blocks_.resize(blocks_.size() + size_);
    blocks_[last_] = block_of(view);
  }
  const Block& last() const { return blocks_[last_]; }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  size_t size_;
  std::vector<Block> blocks_;
  std::vector<size_t> arrays_;  // of each rank
  size_t last_ = 0;
};

// Whether an element of one array shares memory with an element of another.
bool share_memory(const std::vector<ArrayView>& views) {
  std::vector<Strided> places;
  places.reserve(views.size());
  for (const ArrayView& view : views)
    if (view.count() != 0) places.push_back(view.place());
  return any_overlap(places);
}

}  // namespace

nb::object PythonGroup::broadcast(nb::handle array, int root, bool async_op, double seconds) {
  ArrayView view(array, root == group_->rank() ? Access::kRead : Access::kWrite, {"tensor"});
  Request request = make(OpKind::kBroadcast, view, site("broadcast").checked_rank(root));
  return issue(std::move(request), {"broadcast", array, async_op, seconds}, view);
}

nb::object PythonGroup::reduce(nb::handle array, int root, nb::handle op, bool retain, bool async_op, double seconds) {
  const CallSite site = this->site("reduce");
  ArrayView view(array, root == group_->rank() ? Access::kUpdate : Access::kRead, {"tensor"});
  if (retain) view.retain();
  Request request = make(OpKind::kReduce, view, site.checked_rank(root));
  reduce_with(request, site.reduction(op, view.dtype()));
  return issue(std::move(request), {"reduce", array, async_op, seconds, retain}, view);
}

template <OpKind kKind>
nb::object PythonGroup::reduce_in_place(nb::handle array, nb::handle op, bool retain, bool async_op, double seconds) {
  ArrayView view(array, Access::kUpdate, {"tensor"});
  if (retain) view.retain();
  Request request = make(kKind, view);
  reduce_with(request, site(op_name(kKind)).reduction(op, view.dtype()));
  return issue(std::move(request), {op_name(kKind), array, async_op, seconds, retain}, view);
}

namespace {

// Raise the error of the first of the calls that failed. The group has ended, so all of them complete soon.
void raise_first_failure(const nb::list& works) {
  for (const nb::handle work : works)
    if (!work.is_none()) nb::cast<Work&>(work).wait(nb::none());
}

}  // namespace

nb::object PythonGroup::all_reduce_coalesced(nb::handle arrays, nb::handle ops, bool retain, bool async_op,
                                             double seconds) {
  const CallSite site = this->site("all_reduce");
  std::vector<ArrayView> views;
  std::vector<ReducedArray> reduced;
  bool are_staged = false;
  for (const nb::handle array : arrays) {
    ArrayView& view = views.emplace_back(array, Access::kUpdate, ParameterName{"tensor"});
    if (retain) view.retain();
    site.require_one_place(views.front(), view);
    const Reduction reduction = site.reduction(ops[reduced.size()], view.dtype());
    are_staged = is_staged(view, OpKind::kAllReduce, reduction.op) || are_staged;
    reduced.push_back({block_of(view), view.dtype(), reduction.op, reduction.factor});
  }
  if (only_checks_) return nb::none();
  if (are_staged && async_op && share_memory(views))
    site.refuse("several arrays on a GPU share memory. Make a call for each, and wait for it before the next one");
  const nb::list results(arrays);
  nb::list works;
  const bool on_device = !views.empty() && views.front().is_on_device();
  std::vector<std::vector<size_t>> packs;
  if (!on_device)
    packs = assign_packs(reduced, share_memory(views));
  else if (are_staged)
    for (size_t index = 0; index < views.size(); ++index) packs.push_back({index});
  else
    packs = assign_neighbours(reduced);
  for (const std::vector<size_t>& pack : packs) {
    auto issued = std::make_shared<Issued>();
    std::vector<ReducedArray> packed;
    for (const size_t index : pack) {
      issued->arrays.push_back(std::move(views[index]));
      packed.push_back(reduced[index]);
    }
    try {
      works.append(issue(on_device ? all_reduce_in_place(packed) : all_reduce_of(std::move(packed)),
                         {"all_reduce", results, async_op, seconds, retain}, std::move(issued)));
    } catch (nb::python_error&) {
      if (group_->end().is_completed()) raise_first_failure(works);
      throw;
    }
  }
  return async_op ? join(works, "all_reduce", results) : nb::none();
}

nb::object PythonGroup::gather(nb::handle array, nb::handle outputs, int root, bool async_op, double seconds) {
  const CallSite site = this->site("gather");
  Arguments arguments(site, 1 + static_cast<size_t>(site.size()));
  site.checked_rank(root);
  const ArrayView& input = arguments.one(array, Access::kRead, "tensor");
  Request request = make(OpKind::kGather, input.dtype(), input.count(), root);
  request.input = input.data();
  if (site.rank() == root) {
    request.outputs = arguments.list(outputs, Access::kWrite, "gather_list");
    require_equal(site, request.outputs, "gather_list", input, "tensor");
    arguments.require_disjoint({block_of(input)}, request.outputs);
  }
  return issue(std::move(request), {"gather", outputs, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::all_gather(nb::handle outputs, nb::handle array, bool async_op, double seconds) {
  const CallSite site = this->site("all_gather");
  Arguments arguments(site, 1 + static_cast<size_t>(site.size()));
  const ArrayView& input = arguments.one(array, Access::kRead, "tensor");
  Request request = make(OpKind::kAllGather, input.dtype(), input.count());
  request.input = input.data();
  request.outputs = arguments.list(outputs, Access::kWrite, "tensor_list");
  require_own(site, request.outputs, "tensor_list", input, "tensor");
  describe_blocks(request.descriptor, request.outputs);
  arguments.require_disjoint({block_of(input)}, request.outputs);
  return issue(std::move(request), {"all_gather", outputs, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::all_gather_single(nb::handle output, nb::handle array, bool async_op, double seconds) {
  return all_gather_into("all_gather_single", output, array, std::nullopt, async_op, seconds);
}

nb::object PythonGroup::all_gather_integers(nb::handle output, nb::handle array, int op, bool async_op,
                                            double seconds) {
  return all_gather_into("all_reduce", output, array, static_cast<ReduceOp>(op), async_op, seconds);
}

nb::object PythonGroup::all_gather_into(const char* op, nb::handle output, nb::handle array,
                                        std::optional<ReduceOp> combined_by, bool async_op, double seconds) {
  const CallSite site = this->site(op);
  Arguments arguments(site, 2);
  const ArrayView& whole = arguments.one(output, Access::kWrite, "output_tensor");
  const ArrayView& input = arguments.one(array, Access::kRead, "input_tensor");
  require_blocks(site, whole, "output_tensor", input, "input_tensor");
  Request request = make(OpKind::kAllGather, input.dtype(), input.count());
  request.input = input.data();
  request.outputs = arguments.equal_blocks(whole);
  arguments.require_disjoint({block_of(input)}, request.outputs);
  request.descriptor.of_integers = combined_by.has_value();
  request.descriptor.reduce_op = combined_by.value_or(ReduceOp::kSum);
  return issue(std::move(request), {op, output, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::scatter(nb::handle array, nb::handle inputs, int root, bool async_op, double seconds) {
  const CallSite site = this->site("scatter");
  Arguments arguments(site, 1 + static_cast<size_t>(site.size()));
  site.checked_rank(root);
  const ArrayView& output = arguments.one(array, Access::kWrite, "tensor");
  Request request = make(OpKind::kScatter, output.dtype(), output.count(), root);
  request.output = output.data();
  if (site.rank() == root) {
    request.inputs = arguments.list(inputs, Access::kRead, "scatter_list");
    require_equal(site, request.inputs, "scatter_list", output, "tensor");
    arguments.require_disjoint(request.inputs, {block_of(output)});
  }
  return issue(std::move(request), {"scatter", array, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::reduce_scatter(nb::handle output, nb::handle inputs, nb::handle op, bool async_op,
                                       double seconds) {
  const CallSite site = this->site("reduce_scatter");
  Arguments arguments(site, 1 + static_cast<size_t>(site.size()));
  const ArrayView& target = arguments.one(output, Access::kWrite, "output");
  Request request = make(OpKind::kReduceScatter, target.dtype(), target.count());
  request.output = target.data();
  request.inputs = arguments.list(inputs, Access::kRead, "input_list");
  require_own(site, request.inputs, "input_list", target, "output");
  describe_blocks(request.descriptor, request.inputs);
  arguments.require_disjoint(request.inputs, {block_of(target)});
  reduce_with(request, site.reduction(op, target.dtype()));
  return issue(std::move(request), {"reduce_scatter", output, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::reduce_scatter_single(nb::handle output, nb::handle array, nb::handle op, bool async_op,
                                              double seconds) {
  const CallSite site = this->site("reduce_scatter_single");
  Arguments arguments(site, 2);
  const ArrayView& target = arguments.one(output, Access::kWrite, "output");
  const ArrayView& whole = arguments.one(array, Access::kRead, "input");
  require_blocks(site, whole, "input", target, "output");
  Request request = make(OpKind::kReduceScatter, target.dtype(), target.count());
  request.output = target.data();
  request.inputs = arguments.equal_blocks(whole);
  arguments.require_disjoint(request.inputs, {block_of(target)});
  reduce_with(request, site.reduction(op, target.dtype()));
  return issue(std::move(request), {"reduce_scatter_single", output, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::all_to_all(nb::handle outputs, nb::handle inputs, bool async_op, double seconds) {
  const CallSite site = this->site("all_to_all");
  Arguments arguments(site, 2 * static_cast<size_t>(site.size()));
  Request request = make(OpKind::kAllToAll, Dtype::kUint8, 0);
  request.outputs = arguments.list(outputs, Access::kWrite, "output_tensor_list");
  request.inputs = arguments.list(inputs, Access::kRead, "input_tensor_list");
  request.descriptor.dtype = arguments.dtype();
  const auto rank = static_cast<size_t>(site.rank());
  require_same_count(site, request.inputs[rank], site.rank(), request.outputs[rank], site.rank());
  arguments.require_disjoint(request.inputs, request.outputs);
  return issue(std::move(request), {"all_to_all", outputs, async_op, seconds}, arguments.issued());
}

nb::object PythonGroup::all_to_all_single(nb::handle output, nb::handle array, nb::handle output_splits,
                                          nb::handle input_splits, bool async_op, double seconds) {
  const CallSite site = this->site("all_to_all_single");
  Arguments arguments(site, 2);
  const ArrayView& target = arguments.one(output, Access::kWrite, "output");
  const ArrayView& source = arguments.one(array, Access::kRead, "input");
  Request request = make(OpKind::kAllToAll, target.dtype(), 0);
  request.outputs = arguments.rows(target, output_splits, "output");
  request.inputs = arguments.rows(source, input_splits, "input");
  const auto rank = static_cast<size_t>(site.rank());
  if (request.inputs[rank].count != request.outputs[rank].count)
    site.refuse("this rank gives itself " + elements(request.inputs[rank].count, target.dtype()) + ", but expects " +
                std::to_string(request.outputs[rank].count) + " from itself");
  arguments.require_disjoint(request.inputs, request.outputs);
  return issue(std::move(request), {"all_to_all_single", output, async_op, seconds}, arguments.issued());
}

// The blocks of a rank that is the neighbour on several sides stand in the order in which they are sent: what goes in
// the negative direction arrives from the positive one, and comes first.
nb::object PythonGroup::neighbor_all_to_all(nb::handle outputs, nb::handle inputs, nb::handle shape,
                                            nb::handle periodic, bool async_op, double seconds) {
  const CallSite site = this->site("neighbor_all_to_all");
  const Mesh mesh(nb::cast<std::vector<int>>(shape), nb::cast<std::vector<bool>>(periodic));
  const size_t sides = 2 * mesh.dimensions();
  site.require_checked(mesh.ranks() == site.size() && nb::len(periodic) == mesh.dimensions(), "shape");
  site.require_checked(nb::len(outputs) == sides && nb::len(inputs) == sides, "output_tensor_list");
  const std::optional<uint64_t> code = mesh.code();
  if (!code) site.refuse("`shape` has too many dimensions to be compared with those of the other ranks");
  Arguments arguments(site, 2 * sides);
  Request request = make(OpKind::kNeighborAllToAll, Dtype::kUint8, 0);
  request.descriptor.splits = *code;
  NeighborBlocks given(site.size());
  NeighborBlocks taken(site.size());
  for (size_t dimension = 0; dimension < mesh.dimensions(); ++dimension) {
    for (const int direction : {-1, 1}) {
      const int to = mesh.neighbor(site.rank(), dimension, direction);
      const int from = mesh.neighbor(site.rank(), dimension, -direction);
      const int input = static_cast<int>(2 * dimension) + (direction == 1 ? 1 : 0);
      const int output = static_cast<int>(2 * dimension) + (direction == 1 ? 0 : 1);
      if (to >= 0) given.add(to, arguments.one(inputs[input], Access::kRead, "input_tensor_list", input));
      if (from >= 0) taken.add(from, arguments.one(outputs[output], Access::kWrite, "output_tensor_list", output));
      if (to < 0 || to != from) continue;
      if (to == site.rank())
        require_same_count(site, given.last(), input, taken.last(), output);
      else if (std::max(given.last().count, taken.last().count) > kMostJoined)
        site.refuse("arrays of more than " + std::to_string(kMostJoined) +
                    " elements cannot be exchanged with a rank that is the neighbour on both sides");
    }
  }
  request.inputs = given.blocks();
  request.outputs = taken.blocks();
  const std::shared_ptr<Issued> issued = arguments.issued();
  if (!issued->arrays.empty()) {
    request.descriptor.dtype = arguments.dtype();
    arguments.require_disjoint(request.inputs, request.outputs, false);
  }
  return issue(std::move(request), {"neighbor_all_to_all", outputs, async_op, seconds}, issued);
}

nb::object PythonGroup::broadcast_iovecs(nb::handle buffers, nb::handle offsets, size_t bytes, double seconds) {
  Request request = make(OpKind::kBroadcast, Dtype::kUint8, bytes, group_->rank());
  return run_iovecs(request, InputIovecs(buffers, offsets, bytes), seconds);
}

nb::object PythonGroup::all_gather_iovecs(nb::handle outputs, nb::handle buffers, nb::handle offsets, size_t bytes,
                                          double seconds) {
  const CallSite site = this->site("all_gather");
  Arguments arguments(site, static_cast<size_t>(site.size()));
  Request request = make(OpKind::kAllGather, Dtype::kUint8, bytes);
  request.outputs = arguments.list(outputs, Access::kWrite, "tensor_list");
  if (arguments.dtype() != Dtype::kUint8) site.refuse_type("expected arrays of uint8 in `tensor_list`");
  if (request.outputs[static_cast<size_t>(site.rank())].count != bytes)
    site.refuse("expected " + elements(bytes, Dtype::kUint8) + " in this rank's array of `tensor_list`");
  describe_blocks(request.descriptor, request.outputs);
  arguments.require_disjoint({}, request.outputs);
  move_through_scratch(request, arguments.issued()->arrays);
  return run_iovecs(request, InputIovecs(buffers, offsets, bytes), seconds);
}

nb::object PythonGroup::rank_first(int first, double seconds) {
  Request request;
  request.descriptor.op = OpKind::kRankFirst;
  request.descriptor.root = site("rank_first").checked_rank(first);
  return issue(std::move(request), {"rank_first", nb::none(), false, seconds}, std::make_shared<Issued>());
}

void PythonGroup::fail_rank_first(const std::string& reason) {
  if (was_forked()) return;
  const Unlocked unlocked;
  group_->fail_call({.op = OpKind::kRankFirst, .root = group_->rank()}, reason);
}

nb::object PythonGroup::barrier(bool async_op, double seconds) {
  Request request;
  request.after_device_work = true;
  return issue(std::move(request), {"barrier", nb::none(), async_op, seconds}, std::make_shared<Issued>());
}

void bind_collectives(nb::class_<PythonGroup>& group) {
#include "collective_bindings.inc"
}

}  // namespace procgroup
