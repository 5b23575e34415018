// Collectives with blocks through shared memory, of whole engines: equal and unequal, small and large, side by side and
// apart, and how their calls fail.
#include <string>
#include <vector>

#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

using Arrays = std::vector<std::vector<int64_t>>;

int64_t element(int from, int to, size_t index) {
  return from * 1'000'000 + to * 10'000 + static_cast<int64_t>(index % 9973);
}

std::vector<int64_t> elements(int from, int to, size_t count) {
  std::vector<int64_t> data(count);
  for (size_t index = 0; index < count; ++index) data[index] = element(from, to, index);
  return data;
}

std::vector<Block> blocks(Arrays& arrays) {
  std::vector<Block> all;
  for (std::vector<int64_t>& array : arrays) all.push_back({array.data(), array.size()});
  return all;
}

Request block_request(OpKind op, size_t count, int root = -1) {
  Request request;
  request.descriptor.op = op;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = count;
  request.descriptor.root = root;
  return request;
}

void run(Group& group, Request& request) {
  NoRuntime language;
  group.run(request, 60, language);
}

void gather(Group& group, size_t count) {
  const int root = static_cast<int>(count % static_cast<size_t>(group.size()));
  std::vector<int64_t> mine = elements(group.rank(), 0, count);
  Arrays outputs;
  Request request = block_request(OpKind::kGather, count, root);
  request.input = mine.data();
  if (group.rank() == root) outputs.assign(static_cast<size_t>(group.size()), std::vector<int64_t>(count));
  request.outputs = blocks(outputs);
  run(group, request);
  for (size_t from = 0; from < outputs.size(); ++from)
    check(outputs[from] == elements(static_cast<int>(from), 0, count), "gather", group.rank());
}

void scatter(Group& group, size_t count) {
  const int root = static_cast<int>(count % static_cast<size_t>(group.size()));
  Arrays inputs;
  if (group.rank() == root)
    for (int to = 0; to < group.size(); ++to) inputs.push_back(elements(root, to, count));
  std::vector<int64_t> mine(count);
  Request request = block_request(OpKind::kScatter, count, root);
  request.inputs = blocks(inputs);
  // On the root, the output is its own block: in place.
  request.output = group.rank() == root ? inputs[static_cast<size_t>(root)].data() : mine.data();
  run(group, request);
  if (group.rank() != root) check(mine == elements(root, group.rank(), count), "scatter", group.rank());
}

size_t unequal(int rank, size_t count) { return rank % 2 == 1 ? count / 3 : count; }

void all_gather(Group& group, size_t count) {
  Arrays outputs;
  Request request = block_request(OpKind::kAllGather, 0);
  request.descriptor.splits = count + 1;
  for (int from = 0; from < group.size(); ++from) {
    outputs.emplace_back(unequal(from, count));
    request.descriptor.count += unequal(from, count);
  }
  // In place: the input is this rank's output.
  std::vector<int64_t>& mine = outputs[static_cast<size_t>(group.rank())];
  mine = elements(group.rank(), 0, mine.size());
  request.input = mine.data();
  request.outputs = blocks(outputs);
  run(group, request);
  for (int from = 0; from < group.size(); ++from)
    check(outputs[static_cast<size_t>(from)] == elements(from, 0, unequal(from, count)), "all_gather", group.rank());
}

void reduce_scatter(Group& group, size_t count, bool equal) {
  Arrays inputs;
  Request request = block_request(OpKind::kReduceScatter, count);
  if (!equal) request.descriptor.count = 0, request.descriptor.splits = count + 1;
  for (int to = 0; to < group.size(); ++to) {
    inputs.push_back(elements(group.rank(), to, equal ? count : unequal(to, count)));
    if (!equal) request.descriptor.count += inputs.back().size();
  }
  std::vector<int64_t> mine(inputs[static_cast<size_t>(group.rank())].size());
  request.inputs = blocks(inputs);
  request.output = mine.data();
  run(group, request);
  for (size_t index = 0; index < mine.size(); ++index) {
    int64_t sum = 0;
    for (int from = 0; from < group.size(); ++from) sum += element(from, group.rank(), index);
    check(mine[index] == sum, equal ? "reduce_scatter" : "reduce_scatter of unequal blocks", group.rank());
  }
}

size_t pair_count(int from, int to, size_t count) {
  return (from + 2 * to) % 3 == 0 ? 0 : count / static_cast<size_t>(1 + to);
}

struct AllToAll {
  AllToAll(Group& group, size_t count) : request(block_request(OpKind::kAllToAll, 0)) {
    for (int peer = 0; peer < group.size(); ++peer) {
      inputs.push_back(elements(group.rank(), peer, pair_count(group.rank(), peer, count)));
      outputs.emplace_back(pair_count(peer, group.rank(), count), -1);
    }
    request.inputs = blocks(inputs);
    request.outputs = blocks(outputs);
  }
  Arrays inputs, outputs;
  Request request;
};

void all_to_all(Group& group, size_t count) {
  AllToAll call(group, count);
  int before = 0;
  int after = 0;
  call.request.before = [&] { ++before; };
  call.request.after = [&] { ++after; };
  run(group, call.request);
  check(before == 1 && after == 1, "before and after run once", group.rank());
  for (int from = 0; from < group.size(); ++from)
    check(
        call.outputs[static_cast<size_t>(from)] == elements(from, group.rank(), pair_count(from, group.rank(), count)),
        "all_to_all", group.rank());
}

// What `before` puts into the array is what the others get.
void before_runs_first(Group& group, size_t count) {
  std::vector<int64_t> data(count);
  Request request = request_for(OpKind::kAllReduce, data);
  std::vector<int64_t> scratch;
  request.before = [&] { request.input = (scratch = values(group.rank(), count)).data(); };
  run(group, request);
  for (size_t index = 0; index < count; ++index) check(data[index] == sum(group.size(), index), "before", group.rank());
}

// Every rank, also one that has no part in it, reports the same pair; no output is written.
void unequal_pairs_are_a_mismatch(int size, size_t count) {
  CASE("%zu elements", count);
  std::vector<Rank> world = make_world(size);
  in_all_ranks(world, [&](Group& group) {
    AllToAll call(group, count);
    bool went_well = false;
    call.request.after = [&] { went_well = true; };
    if (group.rank() == 1) call.request.outputs[0].count += 1;
    const Arrays untouched = call.outputs;
    NoRuntime language;
    try {
      group.run(call.request, 60, language);
      check(false, "expected a mismatch", group.rank());
    } catch (const OperationFailed& failed) {
      const size_t given = pair_count(0, 1, count);
      const std::string expected = "rank 0 gives " + std::to_string(given) + " int64 to rank 1, which expects " +
                                   std::to_string(given + 1) + " int64 from it";
      check(failed.failure.kind == Failure::Kind::kMismatch, "kind of a mismatch", group.rank());
      check(failed.failure.reason == expected, failed.failure.reason.c_str(), group.rank());
    }
    check(call.outputs == untouched && !went_well, "a mismatch changed an array", group.rank());
  });
}

void everything(int size, ReadingRanges reading) {
  CASE("read from %zu bytes on", reading.of(OpKind::kGather).from);
  std::vector<Rank> world = make_world(size, reading);
  in_all_ranks(world, [](Group& group) {
    for (const size_t count : {0, 1, 2, 6, 7, 31, 32, 127, 999, 3001}) {
      CASE("%zu elements", count);
      gather(group, count);
      scatter(group, count);
      all_gather(group, count);
      reduce_scatter(group, count, true);
      reduce_scatter(group, count, false);
      all_to_all(group, count);
      before_runs_first(group, count);
    }
  });
  for (Rank& rank : world) rank.group->leave();
  for (Rank& rank : world) rank.engine->shutdown();
}

}  // namespace

int main() {
  for (const int size : {1, 2, 3, 4, 7}) {
    CASE("%d ranks", size);
    RUN_TEST(everything, size, ReadingRanges::all({}));           // through slots
    RUN_TEST(everything, size, ReadingRanges::all({.from = 0}));  // in place
    if (size == 1) continue;
    for (const size_t count : {2, 3001}) RUN_TEST(unequal_pairs_are_a_mismatch, size, count);
  }
}
