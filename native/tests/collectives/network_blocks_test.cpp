// Collectives in which ranks have blocks for each other, over messages: where blocks go, and what hostile ranks send.
#include <cstring>
#include <string>
#include <vector>

#include "tests/collectives/any_call.hpp"
#include "tests/collectives/network_fixture.hpp"

namespace procgroup::testing {
namespace {

// One rank's part in a call of the group.
struct BlocksCall : AnyCall {
  BlocksCall(CallKind kind, int rank, int size, uint64_t sequence = 1)
      : AnyCall(kind, static_cast<int64_t>(sequence), rank, size) {
    request().descriptor.group = kGroup;
    request().descriptor.sequence = sequence;
  }
};

void blocks_go_where_they_belong() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int size : {1, 2, 3, 4, 7}) {
      run_ranks(size, kind, 16 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
        NetworkGroup group(messages, everybody(rank, size), kTiny);
        uint64_t sequence = 0;
        for (const size_t count :
             {size_t{0}, size_t{1}, static_cast<size_t>(size), size_t{8}, size_t{97}, size_t{1500}})
          for (const OpKind op : kAllOps)
            for (const bool is_even : {false, true}) {
              CASE("%s of %zu elements, even %d", op_name(op), count, is_even);
              BlocksCall call({.op = op, .count = count, .root = size - 1, .is_even = is_even}, rank, size, ++sequence);
              CollectiveCall operation(group.state(), call.request());
              finish(operation, messages, doorbell);
              CHECK(operation.failure() == nullptr && call.is_right());
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
      BlocksCall call({.op = OpKind::kAllToAll, .count = count, .is_even = true}, rank, 4);
      Array longer(count + 1);
      if (rank == 2) call.request().inputs[1] = {longer.data(), longer.size()};
      const std::vector<Array> before = call.outputs();
      CollectiveCall operation(group.state(), call.request());
      finish(operation, messages, doorbell);
      const Failure* failure = operation.failure();
      CHECK(failure != nullptr && failure->is<Mismatch>() && failure->as<Mismatch>()->calls.size() == 4);
      const std::string text = "rank 2 gives " + std::to_string(count + 1) + " int64 to rank 1, which expects " +
                               std::to_string(count) + " int64 from it";
      CHECK(failure->as<Mismatch>()->reason == text && call.outputs() == before);
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
        BlocksCall call({.op = OpKind::kAllToAll, .count = 4, .is_even = true}, rank, 2);
        if (rank == 1) {
          Bytes record(sizeof(Descriptor) + 4 * sizeof claimed + more);
          std::memcpy(record.data(), &call.request().descriptor, sizeof(Descriptor));
          for (size_t index = 0; index < 4; ++index)
            std::memcpy(record.data() + sizeof(Descriptor) + index * sizeof claimed, &claimed, sizeof claimed);
          messages.post(0, kAnnouncements, entry_of(1, record));
          return flush(messages);
        }
        const std::vector<Array> before = call.outputs();
        CollectiveCall operation(group.state(), call.request());
        finish(operation, messages, doorbell);
        CHECK(operation.failure() != nullptr && call.outputs() == before);
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
      BlocksCall call({.op = OpKind::kAllGather, .count = 1000, .is_even = true}, rank, 2);
      if (rank == 1) {
        Bytes record(sizeof(Descriptor));
        std::memcpy(record.data(), &call.request().descriptor, sizeof(Descriptor));
        messages.post(0, kAnnouncements, entry_of(1, record));
        messages.post(0, data_key(1), Bytes(bytes));
        if (bytes <= kEagerBytes) flush(messages);
        return;
      }
      CollectiveCall operation(group.state(), call.request());
      finish(operation, messages, doorbell);
      const Failure* failure = operation.failure();
      CHECK(failure != nullptr && failure->is<Failed>() && failure->as<Failed>()->peer == 1);
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
