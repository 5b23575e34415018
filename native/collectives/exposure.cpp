#include "collectives/exposure.hpp"

#include "collectives/block_counts.hpp"
#include "collectives/buffer_table.hpp"

namespace procgroup {
namespace {

// Adds arrays to a buffer table, and tests whether they can be read in place.
class Show {
 public:
  Show(CollectiveState& state, const Descriptor& call, bool exposes)
      : own_(*(*state.arenas)[static_cast<size_t>(state.rank)]),
        readable_(state.readable),
        element_(dtype_size(call.dtype)),
        exposes_(exposes) {}

  void add(BufferEntry& entry, const Block& block) {
    entry.count = block.announced();
    if (block.count == 0) return;
    entry.place = RemotePlace::of(block.data, block.count * element_, own_);
    if (entry.place.in_arena()) return;
    in_arena_ = false;
    exposes_ = exposes_ && readable_.has(block.data);
  }
  BufferTableHeader head(bool reads_everything) const { return {in_arena_, exposes_, reads_everything}; }

 private:
  const Arena& own_;
  ReadableArrays& readable_;
  size_t element_;
  bool exposes_;
  bool in_arena_ = true;
};

// Whether other ranks read this rank's input: a root that receives keeps its own.
bool shows(const Descriptor& call, int rank) {
  return gives(call.op, rank, call.root) && !(row_of(call.op).takers == Ranks::kRoot && rank == call.root);
}

// A reduction of the lower ranks reads another number of arrays on each rank, and none at all on the first.
bool may_be_read(OpKind op) { return row_of(op).sources == Sources::kAll; }

}  // namespace

void show_arrays(CollectiveState& state, const Request& request, bool exposes) {
  const Descriptor& call = request.descriptor;
  const BufferTable table(state.mine().small(call.sequence), state.size());
  Show show(state, call, exposes && request.iovecs.empty());
  if (shows(call, state.rank)) {
    for (size_t block = 0; block < request.inputs.size(); ++block)
      show.add(table.input(static_cast<int>(block)), request.inputs[block]);
    if (request.inputs.empty())
      show.add(table.input(0), {const_cast<void*>(request.input), input_count(request, state.rank)});
    if (call.op == OpKind::kAllReduce) show.add(table.output(0), {request.output, call.count});
  }
  if (is_by_pair(call.op))
    for (size_t block = 0; block < request.outputs.size(); ++block)
      table.output(static_cast<int>(block)).count = request.outputs[block].announced();
  table.head() = show.head(state.reads_everything);
}

bool may_be_read(const CollectiveState& state, const Descriptor& call, size_t bytes) {
  if (!may_be_read(call.op)) return false;
  const BufferTable mine(state.member(state.rank).small(call.sequence), state.size());
  return mine.head().in_arena || state.reading.of(call.op).has(bytes);
}

bool all_read(const CollectiveState& state, const Descriptor& call, size_t bytes) {
  if (!may_be_read(call.op)) return false;
  bool in_arenas = true;
  bool anywhere = true;
  for (int rank = 0; rank < state.size(); ++rank) {
    const BufferTableHeader head = BufferTable(state.member(rank).small(call.sequence), state.size()).head();
    in_arenas = in_arenas && head.in_arena;
    anywhere = anywhere && head.reads_everything && (head.in_arena || head.exposes);
  }
  return in_arenas || (anywhere && state.reading.of(call.op).has(bytes));
}

void end_exposure(CollectiveState& state, uint64_t sequence) {
  state.mine().memory().abandoned.store(sequence, std::memory_order_seq_cst);
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before the owner's next write into the array
#endif
}

bool is_exposed(const CollectiveState& state, int rank, uint64_t sequence) {
#if !defined(__SANITIZE_THREAD__)                       // which does not support fences
  std::atomic_thread_fence(std::memory_order_acquire);  // the reads of the array come before this load
#endif
  return state.member(rank).memory().abandoned.load(std::memory_order_seq_cst) < sequence;
}

}  // namespace procgroup
