// Collectives in which ranks have blocks for each other, over messages: where blocks go, and what hostile ranks send.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/check.hpp"
#include "tests/collectives/network_fixture.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

constexpr Dtype kDtype = Dtype::kInt64;

enum class Sizes { kEqual, kUneven };

// Elements that rank `from` has for rank `to`.
size_t part(OpKind op, Sizes sizes, int from, int to, size_t count) {
  if (sizes == Sizes::kEqual) return count;
  const int varied = op == OpKind::kAllGather ? from * 5 : op == OpKind::kReduceScatter ? to * 3 : from * 5 + to * 3;
  return static_cast<size_t>(varied % 4) * count / 2;
}

Bytes block(int from, int to, size_t count) { return input_of(kDtype, count, from, static_cast<unsigned>(to)); }

// The blocks that a rank gives and has room for; the input of gather and all_gather is the same for everybody.
std::unique_ptr<TestCall> make_call(OpKind op, Sizes sizes, size_t count, int rank, int size, uint64_t sequence) {
  const bool gives_one = op == OpKind::kGather || op == OpKind::kAllGather;
  const bool takes_one = op == OpKind::kScatter || op == OpKind::kReduceScatter;
  const bool rooted = op == OpKind::kGather || op == OpKind::kScatter;
  const int root = rooted ? size - 1 : -1;
  auto call = std::make_unique<TestCall>();
  Request& request = call->request;
  request.descriptor = call_of(op, kDtype, ReduceOp::kSum, op == OpKind::kAllToAll ? 0 : count, root, sequence);
  if (sizes == Sizes::kUneven && op != OpKind::kAllToAll) request.descriptor.splits = 1;
  for (int peer = 0; peer < size; ++peer) {
    if (!gives_one) call->inputs.push_back(block(rank, peer, part(op, sizes, rank, peer, count)));
    if (!takes_one) call->outputs.emplace_back(part(op, sizes, peer, rank, count) * dtype_size(kDtype));
  }
  call->array = block(rank, 0, part(op, sizes, rank, rank, count));
  request.input = call->array.data();
  Bytes& output = call->outputs.emplace_back(takes_one ? part(op, sizes, rank, rank, count) * dtype_size(kDtype) : 0);
  request.output = output.data();
  const auto list = [](std::vector<Bytes>& arrays, size_t wanted, std::vector<Block>& blocks) {
    for (size_t index = 0; index < wanted; ++index)
      blocks.push_back({arrays[index].data(), arrays[index].size() / dtype_size(kDtype)});
  };
  if (op != OpKind::kScatter || rank == root) list(call->inputs, call->inputs.size(), request.inputs);
  if (op != OpKind::kGather || rank == root) list(call->outputs, call->outputs.size() - 1, request.outputs);
  return call;
}

Bytes summed(int to, int size, size_t count) {
  Bytes out(count * dtype_size(kDtype));
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (int from = 0; from < size; ++from) inputs.push_back(block(from, to, count));
  for (const Bytes& input : inputs) sources.push_back(input.data());
  if (count > 0) reduce(kDtype, ReduceOp::kSum, out.data(), sources.data(), size, count);
  return out;
}

void check_outputs(OpKind op, Sizes sizes, size_t count, const TestCall& call, int rank, int size) {
  const auto expected = [&](int from) {
    const bool same_for_all = op == OpKind::kGather || op == OpKind::kAllGather;
    return block(from, same_for_all ? 0 : rank, part(op, sizes, from, rank, count));
  };
  if (op == OpKind::kReduceScatter) CHECK_EQUAL(call.outputs[0], summed(rank, size, part(op, sizes, 0, rank, count)));
  if (op == OpKind::kScatter) CHECK_EQUAL(call.outputs[0], expected(size - 1));
  for (int from = 0; from < static_cast<int>(call.request.outputs.size()); ++from) {
    CASE("from rank %d", from);
    CHECK_EQUAL(call.outputs[static_cast<size_t>(from)], expected(from));
  }
}

struct BlocksCase {
  OpKind op;
  Sizes sizes;
  size_t count;
};

std::vector<BlocksCase> every_case(int size) {
  std::vector<BlocksCase> cases;
  for (const size_t count : {size_t{0}, size_t{1}, static_cast<size_t>(size), size_t{8}, size_t{97}, size_t{1500}}) {
    for (const OpKind op :
         {OpKind::kGather, OpKind::kAllGather, OpKind::kScatter, OpKind::kReduceScatter, OpKind::kAllToAll}) {
      cases.push_back({op, Sizes::kEqual, count});
      const bool may_differ = op != OpKind::kGather && op != OpKind::kScatter;
      if (may_differ) cases.push_back({op, Sizes::kUneven, count});
    }
  }
  return cases;
}

void blocks_go_where_they_belong() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int size : {1, 2, 3, 4, 7}) {
      const std::vector<BlocksCase> cases = every_case(size);
      run_ranks(size, kind, 16 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
        NetworkGroup group(messages, everybody(rank, size), kTiny);
        uint64_t sequence = 0;
        for (const auto& [op, sizes, count] : cases) {
          CASE("%s of %zu %s elements", op_name(op), count, sizes == Sizes::kEqual ? "equal" : "uneven");
          const auto call = make_call(op, sizes, count, rank, size, ++sequence);
          CollectiveCall operation(group.state(), call->request);
          finish(operation, messages, doorbell);
          CHECK(operation.failure() == nullptr);
          check_outputs(op, sizes, count, *call, rank, size);
        }
      });
    }
  }
}

void a_pair_that_disagrees_is_named_on_every_rank() {
  for (const size_t count : {size_t{2}, size_t{1000}}) {
    CASE("%zu elements", count);
    run_ranks(4, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
      NetworkGroup group(messages, everybody(rank, 4), kTiny);
      const auto call = make_call(OpKind::kAllToAll, Sizes::kEqual, count, rank, 4, 1);
      if (rank == 2) {
        call->inputs[1].resize(call->inputs[1].size() + 8);
        call->request.inputs[1] = {call->inputs[1].data(), count + 1};
      }
      const std::vector<Bytes> before = call->outputs;
      CollectiveCall operation(group.state(), call->request);
      finish(operation, messages, doorbell);
      const Failure* failure = operation.failure();
      CHECK(failure != nullptr && failure->kind == Failure::Kind::kMismatch && failure->calls.size() == 4);
      const std::string text = "rank 2 gives " + std::to_string(count + 1) + " int64 to rank 1, which expects " +
                               std::to_string(count) + " int64 from it";
      CHECK(failure->reason == text && call->outputs == before);
    });
  }
}

// A record of an all_to_all whose counts are anything: what is claimed is compared, never allocated or read.
void hostile_counts_fail_the_call_only() {
  for (const uint64_t claimed : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 61, UINT64_MAX}) {
    for (const size_t more : {size_t{0}, size_t{1}, size_t{32}}) {
      CASE("%zu claimed, %zu more bytes", claimed, more);
      run_ranks(2, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
        NetworkGroup group(messages, everybody(rank, 2), kTiny);
        const auto call = make_call(OpKind::kAllToAll, Sizes::kEqual, 4, rank, 2, 1);
        if (rank == 1) {
          Bytes record(sizeof(Descriptor) + 4 * sizeof claimed + more);
          std::memcpy(record.data(), &call->request.descriptor, sizeof(Descriptor));
          for (size_t index = 0; index < 4; ++index)
            std::memcpy(record.data() + sizeof(Descriptor) + index * sizeof claimed, &claimed, sizeof claimed);
          messages.post(0, kAnnouncements, entry_of(1, record));
          return flush(messages);
        }
        const std::vector<Bytes> before = call->outputs;
        CollectiveCall operation(group.state(), call->request);
        finish(operation, messages, doorbell);
        CHECK(operation.failure() != nullptr && call->outputs == before);
      });
    }
  }
}

// Agrees, and then sends a segment of another length, or none and leaves.
void a_segment_of_another_length_is_its_senders_fault() {
  for (const size_t bytes : {size_t{0}, size_t{8}, size_t{20'000}}) {
    CASE("%zu bytes", bytes);
    run_ranks(2, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
      NetworkGroup group(messages, everybody(rank, 2), kTiny);
      const auto call = make_call(OpKind::kAllGather, Sizes::kEqual, 1000, rank, 2, 1);
      if (rank == 1) {
        Bytes record(sizeof(Descriptor));
        std::memcpy(record.data(), &call->request.descriptor, sizeof(Descriptor));
        messages.post(0, kAnnouncements, entry_of(1, record));
        messages.post(0, data_key(1), Bytes(bytes));
        if (bytes <= kEagerBytes) flush(messages);
        return;
      }
      CollectiveCall operation(group.state(), call->request);
      finish(operation, messages, doorbell);
      const Failure* failure = operation.failure();
      CHECK(failure != nullptr && failure->kind == Failure::Kind::kFailed && failure->peer == 1);
    });
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(blocks_go_where_they_belong);
  RUN_TEST(a_pair_that_disagrees_is_named_on_every_rank);
  RUN_TEST(hostile_counts_fail_the_call_only);
  RUN_TEST(a_segment_of_another_length_is_its_senders_fault);
}
