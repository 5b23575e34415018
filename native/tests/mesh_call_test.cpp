// Collectives over messages: every op against the reduce kernel, agreement, losses, giving up.
#include "engine/mesh_call.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "dtype/dtype.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr MeshLimits kTiny{.small_bytes = 64, .segment_bytes = 256};  // so that few elements make many segments
constexpr uint64_t kGroup = 11;

GroupView everybody(int rank, int size) {
  GroupView group{kGroup, rank, {}};
  for (int member = 0; member < size; ++member) group.members.push_back(member);
  return group;
}

Descriptor call_of(OpKind op, Dtype dtype, ReduceOp reduce_op, size_t count, int root = -1, uint64_t sequence = 1) {
  Descriptor call;
  call.group = kGroup;
  call.sequence = sequence;
  call.op = op;
  call.dtype = dtype;
  call.reduce_op = reduce_op;
  call.root = root;
  call.count = count;
  return call;
}

template <typename Element>
void fill_as(Bytes& array, int rank, unsigned seed) {
  for (size_t index = 0; index < array.size() / sizeof(Element); ++index) {
    const auto value = static_cast<Element>((index * 5 + static_cast<size_t>(rank) * 3 + seed) % 7 + 1);
    std::memcpy(array.data() + index * sizeof value, &value, sizeof value);
  }
}

// Sixteen-bit floats from 1 up, an ulp apart: their sums are exact as float32 and not as float16.
void fill_halves(Bytes& array, int rank, unsigned seed, uint16_t one) {
  for (size_t index = 0; index < array.size() / 2; ++index) {
    const auto value = static_cast<uint16_t>(one + (index * 5 + static_cast<size_t>(rank) * 3 + seed) % 61);
    std::memcpy(array.data() + index * 2, &value, 2);
  }
}

// What a rank contributes. Small numbers, so that every order of summation gives the same bits.
Bytes input_of(Dtype dtype, size_t count, int rank, unsigned seed = 0) {
  Bytes array(count * dtype_size(dtype));
  switch (dtype) {
    case Dtype::kFloat32:
      fill_as<float>(array, rank, seed);
      break;
    case Dtype::kFloat64:
      fill_as<double>(array, rank, seed);
      break;
    case Dtype::kInt64:
      fill_as<int64_t>(array, rank, seed);
      break;
    case Dtype::kFloat16:
      fill_halves(array, rank, seed, 0x3c00);
      break;
    case Dtype::kBfloat16:
      fill_halves(array, rank, seed, 0x3f80);
      break;
    default:
      fill_as<uint8_t>(array, rank, seed);
  }
  return array;
}

Bytes reduced(const Descriptor& call, int size) {
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(input_of(call.dtype, call.count, rank));
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes out(call.bytes());
  if (call.count > 0) reduce(call.dtype, call.reduce_op, out.data(), sources.data(), size, call.count);
  return out;
}

void finish(MeshCall& operation, Messages& messages, Doorbell& doorbell) {
  pump_until(messages, doorbell, [&] {
    while (operation.advance() == Progress::kMoved) {
    }
    return operation.is_over();
  });
}

struct CallCase {
  Descriptor call;
  bool in_place;
};

std::vector<CallCase> cases_for(int size) {
  const size_t ranks = static_cast<size_t>(size);
  std::vector<CallCase> cases;
  uint64_t sequence = 0;
  const auto add = [&](OpKind op, Dtype dtype, ReduceOp reduce_op, size_t count, int root = -1) {
    ++sequence;
    cases.push_back({call_of(op, dtype, reduce_op, count, root, sequence), sequence % 2 == 0});
  };
  for (const size_t count : {size_t{0}, size_t{1}, ranks - 1, ranks, size_t{97}, size_t{3001}}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16, Dtype::kInt64, Dtype::kUint8}) {
      add(OpKind::kAllReduce, dtype, ReduceOp::kSum, count);
    }
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16}) {
      add(OpKind::kAllReduce, dtype, ReduceOp::kAvg, count);
      add(OpKind::kAllReduce, dtype, ReduceOp::kMax, count);
    }
    add(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kProduct, count);
    add(OpKind::kReduce, Dtype::kFloat16, ReduceOp::kSum, count, size - 1);
    add(OpKind::kReduce, Dtype::kFloat32, ReduceOp::kAvg, count, 0);
    add(OpKind::kBroadcast, Dtype::kInt64, ReduceOp::kSum, count, static_cast<int>(count) % size);
    add(OpKind::kAllGather, Dtype::kFloat64, ReduceOp::kSum, count);
    add(OpKind::kBarrier, Dtype::kUint8, ReduceOp::kSum, 0);
  }
  return cases;
}

// The one output of all ops but all_gather: what it must be on this rank, given what it was before.
Bytes expected_output(const Descriptor& call, int rank, int size, const Bytes& before) {
  if (call.op == OpKind::kBroadcast) return input_of(call.dtype, call.count, call.root);
  const bool written = call.op == OpKind::kAllReduce || (call.op == OpKind::kReduce && rank == call.root);
  return written ? reduced(call, size) : before;
}

void check_all_gather(const CallCase& entry, int rank, int size, Messages& messages, Doorbell& doorbell) {
  const Descriptor& call = entry.call;
  Bytes input = input_of(call.dtype, call.count, rank);
  Bytes whole(call.bytes() * static_cast<size_t>(size));
  std::vector<void*> outputs;
  for (int member = 0; member < size; ++member) {
    outputs.push_back(whole.data() + static_cast<size_t>(member) * call.bytes());
  }
  void* mine = outputs[static_cast<size_t>(rank)];
  if (entry.in_place && !input.empty()) std::memcpy(mine, input.data(), input.size());
  MeshCall operation(messages, everybody(rank, size), call, entry.in_place ? mine : input.data(), nullptr, outputs,
                     kTiny);
  finish(operation, messages, doorbell);
  CHECK(operation.failure() == nullptr);
  for (int member = 0; member < size; ++member) {
    const Bytes expected = input_of(call.dtype, call.count, member);
    CHECK(expected.empty() || std::memcmp(outputs[static_cast<size_t>(member)], expected.data(), expected.size()) == 0);
  }
}

void check_case(const CallCase& entry, int rank, int size, Messages& messages, Doorbell& doorbell) {
  const Descriptor& call = entry.call;
  if (call.op == OpKind::kAllGather) return check_all_gather(entry, rank, size, messages, doorbell);
  Bytes input = input_of(call.dtype, call.count, rank);
  const Bytes original = input;
  Bytes separate(input.size(), std::byte{0x5a});
  Bytes& output = entry.in_place ? input : separate;
  const Bytes before = output;
  MeshCall operation(messages, everybody(rank, size), call, input.data(), output.data(), {}, kTiny);
  finish(operation, messages, doorbell);
  CHECK(operation.failure() == nullptr);
  CHECK(output == expected_output(call, rank, size, before));
  CHECK(entry.in_place || input == original);
}

void every_op_gives_what_the_kernel_gives() {
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    for (const int size : {1, 2, 3, 4, 7}) {
      const std::vector<CallCase> cases = cases_for(size);
      run_ranks(size, kind, 16 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
        for (const CallCase& entry : cases) check_case(entry, rank, size, messages, doorbell);
      });
    }
  }
}

void default_limits_carry_a_large_array() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 1'000'003);
  for (const LinkKind kind : {LinkKind::kTcp, LinkKind::kRing}) {
    run_ranks(3, kind, 64 * 1024, [&](int rank, Messages& messages, Doorbell& doorbell) {
      Bytes array = input_of(call.dtype, call.count, rank);
      MeshCall operation(messages, everybody(rank, 3), call, array.data(), array.data(), {});
      finish(operation, messages, doorbell);
      CHECK(operation.failure() == nullptr && array == reduced(call, 3));
    });
  }
}

// Values whose sums depend on the order: what counts is that all ranks get the same bits.
void results_are_bit_identical_on_all_ranks() {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    for (const size_t count : {size_t{13}, size_t{5000}}) {
      const Descriptor call = call_of(OpKind::kAllReduce, dtype, ReduceOp::kAvg, count);
      std::vector<Bytes> results(4);
      run_ranks(4, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
        Bytes array(call.bytes());
        std::mt19937 random(static_cast<unsigned>(rank));
        for (std::byte& byte : array) byte = static_cast<std::byte>(random() & 0x3f);
        MeshCall operation(messages, everybody(rank, 4), call, array.data(), array.data(), {}, kTiny);
        finish(operation, messages, doorbell);
        CHECK(operation.failure() == nullptr);
        results[static_cast<size_t>(rank)] = std::move(array);
      });
      for (const Bytes& result : results) CHECK(result == results[0]);
    }
  }
}

Descriptor differing(const Descriptor& call, int field) {
  Descriptor other = call;
  switch (field) {
    case 0:
      other.op = OpKind::kBroadcast;
      break;
    case 1:
      other.dtype = Dtype::kInt32;
      break;
    case 2:
      other.reduce_op = ReduceOp::kMax;
      break;
    case 3:
      other.root = 1;
      break;
    case 4:
      other.count = 1;
      break;
    case 5:
      other.count = 2000;
      break;
    default:
      other.sequence += 1;
  }
  return other;
}

void a_call_that_differs_fails_on_every_rank_and_changes_nothing() {
  for (const size_t count : {size_t{3}, size_t{1000}}) {
    for (int field = 0; field < 7; ++field) {
      run_ranks(3, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
        const Descriptor usual = call_of(OpKind::kReduce, Dtype::kFloat32, ReduceOp::kSum, count, 0, 5);
        const Descriptor call = rank == 2 ? differing(usual, field) : usual;
        Bytes array = input_of(call.dtype, call.count, rank);
        const Bytes before = array;
        MeshCall operation(messages, everybody(rank, 3), call, array.data(), array.data(), {}, kTiny);
        finish(operation, messages, doorbell);
        const Failure* failure = operation.failure();
        CHECK(failure != nullptr && failure->kind == Failure::Kind::kMismatch && array == before);
        CHECK(failure->calls.size() == 3 && failure->calls[0] == usual.describe());
        CHECK(failure->calls[2] == differing(usual, field).describe());
      });
    }
  }
}

void a_mismatch_is_told_though_one_rank_never_comes() {
  run_ranks(3, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell&) {
    if (rank == 2) return;
    const size_t count = rank == 0 ? 4 : 5;
    const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, count);
    Bytes array = input_of(call.dtype, call.count, rank);
    MeshCall operation(messages, everybody(rank, 3), call, array.data(), array.data(), {}, kTiny);
    while (operation.advance() != Progress::kDone) {
      messages.pump();
      poll(nullptr, 0, 5);
    }
    CHECK(operation.failure()->kind == Failure::Kind::kMismatch && operation.failure()->calls[2] == "nothing yet");
  });
}

void records_from_a_hostile_peer_fail_the_call_only() {
  const std::vector<Bytes> records = {Bytes(0), Bytes(31), Bytes(sizeof(Descriptor), std::byte{0xff}), Bytes(20'000)};
  for (const Bytes& record : records) {
    run_ranks(2, LinkKind::kUnixSocket, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
      if (rank == 1) {
        messages.post(0, {kGroup, uint64_t{1} << 63}, record);
        return pump_until(messages, doorbell, [&] { return messages.flushed() || record.size() > kEagerBytes; });
      }
      const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 4);
      Bytes array = input_of(call.dtype, call.count, rank);
      const Bytes before = array;
      MeshCall operation(messages, everybody(rank, 2), call, array.data(), array.data(), {}, kTiny);
      finish(operation, messages, doorbell);
      CHECK(operation.failure() != nullptr && array == before);
    });
  }
}

// World ranks 3, 0 and 2 are group ranks 0, 1 and 2.
GroupView shuffled_group(int world_rank) {
  GroupView group{kGroup, 0, {3, 0, 2}};
  group.rank = group.group_rank(world_rank);
  return group;
}

void a_group_may_list_its_members_in_any_order() {
  const Descriptor call = call_of(OpKind::kBroadcast, Dtype::kInt64, ReduceOp::kSum, 500, 1);
  run_ranks(4, LinkKind::kTcp, 0, [&](int world_rank, Messages& messages, Doorbell& doorbell) {
    if (world_rank == 1) return;
    Bytes array = input_of(call.dtype, call.count, world_rank);
    MeshCall operation(messages, shuffled_group(world_rank), call, array.data(), array.data(), {}, kTiny);
    finish(operation, messages, doorbell);
    CHECK(operation.failure() == nullptr && array == input_of(call.dtype, call.count, 0));
  });
}

// One rank agrees and then dies. Its ring neighbour sees that; the others learn it from the notice, or by themselves.
void a_rank_lost_in_mid_call_is_named_on_every_survivor() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat64, ReduceOp::kSum, 400'000);
  run_ranks(4, LinkKind::kUnixSocket, 0, [&](int world_rank, Messages& messages, Doorbell& doorbell) {
    if (world_rank == 1) return;
    Bytes array = input_of(call.dtype, call.count, world_rank);
    MeshCall operation(messages, shuffled_group(world_rank), call, array.data(), array.data(), {},
                       {.small_bytes = 64, .segment_bytes = 64 * 1024});
    if (world_rank == 2) {
      pump_until(messages, doorbell, [&] { return operation.advance() == Progress::kMoved; });
      for (const int peer : {0, 3}) {
        Failure gone{};
        gone.kind = Failure::Kind::kLost;
        gone.peer = peer;
        messages.fail_peer(peer, gone);
      }
      return;
    }
    finish(operation, messages, doorbell);
    const Failure* failure = operation.failure();
    CHECK(failure != nullptr && failure->kind == Failure::Kind::kLost && failure->peer == 2);
  });
}

// Five ranks in a ring; rank 4 fails with a loss that only it can see. All others must hear which rank it was.
void a_loss_that_one_rank_sees_is_told_to_all() {
  const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat64, ReduceOp::kSum, 100'000);
  run_ranks(5, LinkKind::kRing, 4096, [&](int rank, Messages& messages, Doorbell& doorbell) {
    if (rank == 2) {  // takes part in the agreement, then goes silent without closing anything
      Bytes array = input_of(call.dtype, call.count, rank);
      MeshCall operation(messages, everybody(rank, 5), call, array.data(), array.data(), {}, kTiny);
      pump_until(messages, doorbell, [&] {
        operation.advance();
        return operation.is_over();
      });
      CHECK(operation.failure()->kind == Failure::Kind::kFailed && operation.failure()->peer == 4);
      return;
    }
    Bytes array = input_of(call.dtype, call.count, rank);
    MeshCall operation(messages, everybody(rank, 5), call, array.data(), array.data(), {}, kTiny);
    if (rank == 4) {
      pump_until(messages, doorbell, [&] { return operation.advance() == Progress::kMoved; });
      Failure killed{};
      killed.kind = Failure::Kind::kLost;
      killed.peer = 2;
      killed.pid = 4711;
      killed.reason = "its process ended";
      operation.give_up(killed);
      CHECK(operation.is_over() && operation.failure()->pid == 4711);
      return;
    }
    finish(operation, messages, doorbell);
    const Failure* failure = operation.failure();
    CHECK(failure != nullptr && failure->kind == Failure::Kind::kLost && failure->peer == 2 && failure->pid == 4711);
    CHECK(failure->reason == "its process ended");
  });
}

void a_call_that_is_given_up_touches_no_array_and_tells_the_others() {
  for (const size_t count : {size_t{4}, size_t{100'000}}) {
    const Descriptor call = call_of(OpKind::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, count);
    std::atomic<bool> given_up{false};
    run_ranks(2, LinkKind::kTcp, 0, [&](int rank, Messages& messages, Doorbell& doorbell) {
      auto array = std::make_unique<Bytes>(input_of(call.dtype, call.count, rank));
      MeshCall operation(messages, everybody(rank, 2), call, array->data(), array->data(), {}, kTiny);
      if (rank == 0) {
        operation.advance();
        CHECK(operation.missing() == std::vector<int>{1});
        Failure timeout{};
        timeout.kind = Failure::Kind::kTimeout;
        operation.give_up(timeout);
        array.reset();
        given_up = true;
        return pump_until(messages, doorbell, [&] { return messages.flushed(); });
      }
      while (!given_up) std::this_thread::yield();
      finish(operation, messages, doorbell);
      if (count > 4) CHECK(operation.failure()->reason.find("timed out") != std::string::npos);
      CHECK(count <= 4 || (operation.failure()->kind == Failure::Kind::kFailed && operation.failure()->peer == 0));
    });
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_op_gives_what_the_kernel_gives);
  RUN_TEST(default_limits_carry_a_large_array);
  RUN_TEST(results_are_bit_identical_on_all_ranks);
  RUN_TEST(a_call_that_differs_fails_on_every_rank_and_changes_nothing);
  RUN_TEST(a_mismatch_is_told_though_one_rank_never_comes);
  RUN_TEST(records_from_a_hostile_peer_fail_the_call_only);
  RUN_TEST(a_group_may_list_its_members_in_any_order);
  RUN_TEST(a_rank_lost_in_mid_call_is_named_on_every_survivor);
  RUN_TEST(a_loss_that_one_rank_sees_is_told_to_all);
  RUN_TEST(a_call_that_is_given_up_touches_no_array_and_tells_the_others);
}
