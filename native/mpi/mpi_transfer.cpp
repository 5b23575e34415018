#include "mpi/mpi_transfer.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "base/clock.hpp"
#include "dtype/partial.hpp"

namespace procgroup {
namespace {

constexpr int64_t kErrorWaitNs = 1'000'000'000;

bool is_half(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16; }

size_t total(const std::vector<Block>& blocks) {
  const auto add = [](size_t sum, const Block& block) { return sum + block.count; };
  return std::accumulate(blocks.begin(), blocks.end(), size_t{0}, add);
}

// Whether the blocks follow one another in memory. An empty one may be anywhere.
bool are_in_one_array(const std::vector<Block>& blocks, size_t element_bytes) {
  const std::byte* next = nullptr;
  for (const Block& block : blocks) {
    if (block.count == 0) continue;
    const auto* const data = static_cast<const std::byte*>(block.data);
    if (next != nullptr && data != next) return false;
    next = data + block.count * element_bytes;
  }
  return true;
}

std::byte* first(const std::vector<Block>& blocks) {
  const auto found = std::ranges::find_if(blocks, [](const Block& block) { return block.count != 0; });
  return found == blocks.end() ? nullptr : static_cast<std::byte*>(found->data);
}

std::vector<int64_t> counts_of(const std::vector<Block>& blocks) {
  std::vector<int64_t> counts;
  counts.reserve(blocks.size());
  for (const Block& block : blocks) counts.push_back(static_cast<int64_t>(block.count));
  return counts;
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
  return offsets;
}

}  // namespace

bool MpiTransfer::is_too_large(const MpiLibrary& library, const Request& request) {
  constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int32_t>::max());
  // Of a gathered reduce_scatter each rank gets its own block of all ranks.
  size_t largest = 0;
  for (const Block& block : request.inputs) largest = std::max(largest, block.count);
  const size_t gathered = request.descriptor.op == OpKind::kReduceScatter ? largest * request.inputs.size() : 0;
  const size_t most = std::max({request.descriptor.count, total(request.inputs), total(request.outputs), gathered});
  return !library.has_large_counts() && most > kMost;
}

Task::State MpiTransfer::test(std::vector<int>& /*awaited*/) {
  if (error_ns_ != 0) {
    if (now_ns() - error_ns_ > kErrorWaitNs) throw std::runtime_error(error_);
    return State::kPending;
  }
  try {
    return move() ? State::kCompleted : State::kPending;
  } catch (const std::runtime_error& error) {
    error_ = error.what();
    error_ns_ = now_ns();
    return State::kPending;
  }
}

bool MpiTransfer::move() {
  if (phase_ == Phase::kNew) begin();
  if (is_lost_) return false;
  if (phase_ == Phase::kCompleted) {
    mpi_.library->progress(mpi_.handle);
    return true;
  }
  const MpiLibrary::State now = mpi_.library->test(handle_);
  is_lost_ = now == MpiLibrary::State::kLost;
  if (now != MpiLibrary::State::kCompleted) return false;
  phase_ = Phase::kCompleted;
  finish(root_);
  return true;
}

void MpiTransfer::begin() {
  const int root = root_;
  phase_ = Phase::kPending;
  if (is_message(call_.op)) {
    const bool sends = call_.op == OpKind::kSend;
    const auto tag = static_cast<int>(number_ % (mpi_.largest_tag + 1));
    if (sends)
      call(MpiFunction::kIsend, request_.input, call_.count, moved(), root, tag);
    else
      call(MpiFunction::kIrecv, request_.output, call_.count, moved(), root, tag);
  } else if (!reduces(call_.op)) {
    start_movement(root);
  } else if (is_gathered()) {
    start_gathered(root);
  } else {
    call_.op == OpKind::kReduceScatter ? start_reduce_scatter() : start_reduction(root);
  }
}

// The arguments of every function end with the communicator and the request.
template <class... Words>
void MpiTransfer::call(MpiFunction function, Words... words) {
  is_lost_ = !mpi_.library->start(function, handle_, words..., mpi_.handle);
}

// MPI forbids that it gets one memory twice, as input and output; a rank says so by `in_place` in place of the input.
void MpiTransfer::start_reduction(int root) {
  const void* input = request_.input;
  if (is_widened()) {
    std::byte* const wide = scratch(call_.count * partial_size(call_.dtype, call_.reduce_op));
    reduce_to_partial(call_.dtype, call_.reduce_op, wide, &request_.input, 1, call_.count);
    input = result_ = wide;
  }
  if (call_.op == OpKind::kExscan) {
    const size_t result_bytes = call_.count * partial_size(call_.dtype, call_.reduce_op);
    if (input == result_) input = copied(input, result_bytes);
    if (!takes(call_.op, mpi_.rank, root)) result_ = scratch(result_bytes);  // MPI leaves open what the first rank gets
    return call(MpiFunction::kIexscan, input, result_, call_.count, reduced(), operation());
  }
  const bool gets = call_.op != OpKind::kReduce || mpi_.rank == root;
  if (gets && input == result_) input = in_place();
  if (call_.op == OpKind::kReduce)
    call(MpiFunction::kIreduce, input, gets ? result_ : nullptr, call_.count, reduced(), operation(), root);
  else
    call(call_.op == OpKind::kScan ? MpiFunction::kIscan : MpiFunction::kIallreduce, input, result_, call_.count,
         reduced(), operation());
}

void MpiTransfer::start_reduce_scatter() {
  const std::vector<Block>& blocks = request_.inputs;
  const size_t bytes = partial_size(call_.dtype, call_.reduce_op);
  const size_t own = result_count();
  std::byte* input = nullptr;
  if (is_widened()) {
    std::byte* next = input = scratch(total(blocks) * bytes);
    for (const Block& block : blocks) {
      const void* const source = block.data;
      reduce_to_partial(call_.dtype, call_.reduce_op, next, &source, 1, block.count);
      next += block.count * bytes;
    }
  } else {
    input = joined(blocks);
  }
  if (is_widened() || request_.output == blocks[static_cast<size_t>(mpi_.rank)].data) result_ = scratch(own * bytes);
  if (call_.splits == 0)
    call(MpiFunction::kIreduceScatterBlock, input, result_, own, reduced(), operation());
  else
    call(MpiFunction::kIreduceScatter, input, result_, list(counts_of(blocks)), reduced(), operation());
}

void MpiTransfer::start_gathered(int root) {
  const auto ranks = static_cast<size_t>(mpi_.size);
  if (call_.op == OpKind::kReduceScatter) {
    const std::vector<int64_t> given = counts_of(request_.inputs);
    const size_t own = result_count();
    const std::vector<int64_t> taken(ranks, static_cast<int64_t>(own));
    gathered_ = scratch(ranks * own * element_bytes());
    return call(MpiFunction::kIalltoallv, joined(request_.inputs), list(given), list(offsets_of(given)), moved(),
                gathered_, list(taken), list(offsets_of(taken)), moved());
  }
  if (call_.op != OpKind::kReduce || mpi_.rank == root) gathered_ = scratch(ranks * call_.count * element_bytes());
  if (call_.op == OpKind::kReduce)
    call(MpiFunction::kIgather, request_.input, call_.count, moved(), gathered_, call_.count, moved(), root);
  else
    call(MpiFunction::kIallgather, request_.input, call_.count, moved(), gathered_, call_.count, moved());
}

void MpiTransfer::start_movement(int root) {
  const std::vector<Block>& inputs = request_.inputs;
  const std::vector<Block>& outputs = request_.outputs;
  const auto own = static_cast<size_t>(mpi_.rank);
  const bool is_root = mpi_.rank == root;
  switch (call_.op) {
    case OpKind::kBroadcast:
      return call(MpiFunction::kIbcast, request_.output, call_.count, moved(), root);
    case OpKind::kGather: {
      result_ = is_root ? room_for(outputs) : nullptr;
      const bool shares = is_root && result_ == first(outputs) && outputs[own].data == request_.input;
      const void* const input = shares ? in_place() : request_.input;
      return call(MpiFunction::kIgather, input, call_.count, moved(), result_, call_.count, moved(), root);
    }
    case OpKind::kScatter: {
      const std::byte* const input = is_root ? joined(inputs) : nullptr;
      const bool shares = is_root && input == first(inputs) && inputs[own].data == request_.output;
      const void* const output = shares ? in_place() : request_.output;
      return call(MpiFunction::kIscatter, input, call_.count, moved(), output, call_.count, moved(), root);
    }
    case OpKind::kAllGather: {
      const void* input = request_.input;
      result_ = room_for(outputs);
      if (result_ == first(outputs) && input == outputs[own].data)
        input = copied(input, outputs[own].count * element_bytes());
      if (call_.splits == 0)
        return call(MpiFunction::kIallgather, input, call_.count, moved(), result_, call_.count, moved());
      const std::vector<int64_t> counts = counts_of(outputs);
      return call(MpiFunction::kIallgatherv, input, outputs[own].count, moved(), result_, list(counts),
                  list(offsets_of(counts)), moved());
    }
    default: {  // all_to_all
      std::vector<int64_t> given = counts_of(inputs);
      std::vector<int64_t> taken = counts_of(outputs);
      const std::vector<int64_t> from = offsets_of(given);
      const std::vector<int64_t> to = offsets_of(taken);
      std::byte* const input = joined(inputs);
      result_ = room_for(outputs);
      const bool shares = inputs[own].data == outputs[own].data;
      if (shares && input == first(inputs) && result_ == first(outputs)) given[own] = taken[own] = 0;
      return call(MpiFunction::kIalltoallv, input, list(given), list(from), moved(), result_, list(taken), list(to),
                  moved());
    }
  }
}

void MpiTransfer::finish(int root) {
  if (is_message(call_.op) || !takes(call_.op, mpi_.rank, root)) return;
  if (gathered_ != nullptr) return reduce_gathered();
  if (has_output_blocks(call_.op)) return copy_out();
  if (!reduces(call_.op)) return;
  const size_t count = result_count();
  if (is_widened() || call_.reduce_op == ReduceOp::kAvg) {
    const void* const source = result_;
    const int divisor = sources_of(call_.op, mpi_.rank, mpi_.size);
    reduce_partials(call_.dtype, call_.reduce_op, request_.output, &source, 1, count, divisor);
  } else if (result_ != request_.output && count != 0) {
    std::memcpy(request_.output, result_, count * element_bytes());
  }
}

void MpiTransfer::reduce_gathered() {
  const size_t count = result_count();
  std::vector<const void*> sources;
  for (int rank = 0; rank < sources_of(call_.op, mpi_.rank, mpi_.size); ++rank)
    sources.push_back(gathered_ + static_cast<size_t>(rank) * count * element_bytes());
  reduce(call_.dtype, call_.reduce_op, request_.output, sources.data(), static_cast<int>(sources.size()), count);
}

void MpiTransfer::copy_out() {
  if (result_ == first(request_.outputs)) return;
  const std::byte* next = result_;
  for (const Block& block : request_.outputs) {
    if (block.count != 0) std::memcpy(block.data, next, block.count * element_bytes());
    next += block.count * element_bytes();
  }
}

// A list of counts or offsets, as wide as the library's.
const void* MpiTransfer::list(const std::vector<int64_t>& numbers) {
  if (mpi_.library->has_large_counts()) return long_lists_.emplace_back(numbers).data();
  return lists_.emplace_back(numbers.begin(), numbers.end()).data();
}

std::byte* MpiTransfer::scratch(size_t bytes) {
  return scratch_.emplace_back(new std::byte[std::max<size_t>(bytes, 1)]).get();
}

std::byte* MpiTransfer::copied(const void* elements, size_t bytes) {
  std::byte* const copy = scratch(bytes);
  if (bytes != 0) std::memcpy(copy, elements, bytes);
  return copy;
}

// The blocks in one array: their own, or a copy.
std::byte* MpiTransfer::joined(const std::vector<Block>& blocks) {
  if (are_in_one_array(blocks, element_bytes())) return first(blocks);
  std::byte* const copy = scratch(total(blocks) * element_bytes());
  std::byte* next = copy;
  for (const Block& block : blocks) {
    if (block.count != 0) std::memcpy(next, block.data, block.count * element_bytes());
    next += block.count * element_bytes();
  }
  return copy;
}

// One array for what comes into the blocks: their own, or another.
std::byte* MpiTransfer::room_for(const std::vector<Block>& blocks) {
  return are_in_one_array(blocks, element_bytes()) ? first(blocks) : scratch(total(blocks) * element_bytes());
}

// The elements that this rank gets of a reduction.
size_t MpiTransfer::result_count() const {
  return call_.op == OpKind::kReduceScatter ? request_.inputs[static_cast<size_t>(mpi_.rank)].count : call_.count;
}

bool MpiTransfer::is_widened() const {
  return is_half(call_.dtype) && partial_size(call_.dtype, call_.reduce_op) != element_bytes();
}

bool MpiTransfer::is_gathered() const {
  if (in_rank_order_ || !has_partial_results(call_.dtype, call_.reduce_op)) return true;
  return reduced() == 0 || operation() == 0;
}

Word MpiTransfer::reduced() const {
  if (is_widened()) return mpi_.library->handles().datatypes[static_cast<size_t>(Dtype::kFloat32)];
  if (is_half(call_.dtype)) return moved();
  return mpi_.library->handles().datatypes[static_cast<size_t>(call_.dtype)];
}

Word MpiTransfer::operation() const {
  const Dtype dtype = is_widened() ? Dtype::kFloat32 : call_.dtype;
  return mpi_.library->operation(call_.reduce_op == ReduceOp::kAvg ? ReduceOp::kSum : call_.reduce_op, dtype);
}

}  // namespace procgroup
