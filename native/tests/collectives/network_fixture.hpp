// What the tests of collectives over messages share: groups of ranks that share no memory, calls, inputs.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "collectives/buffer_table.hpp"
#include "collectives/collective_call.hpp"
#include "collectives/relay.hpp"
#include "dtype/dtype.hpp"
#include "group/group_heap.hpp"
#include "tests/check.hpp"
#include "tests/links.hpp"

namespace procgroup::testing {

using Bytes = std::vector<std::byte>;

inline constexpr MessageLimits kTiny{.small_bytes = 64,
                                     .segment_bytes = 256};  // so that few elements make many segments
inline constexpr uint64_t kGroup = 11;

inline GroupView everybody(int rank, int size) {
  GroupView group{kGroup, rank, {}};
  for (int member = 0; member < size; ++member) group.members.push_back(member);
  return group;
}

// One rank of a group in which each rank is on a host of its own, over messages of the test's own.
class NetworkGroup {
 public:
  NetworkGroup(Messages& messages, const GroupView& view, MessageLimits limits = {})
      : view_(view), arenas_(view.members.size()) {
    const size_t size = view.members.size();
    const size_t rank = static_cast<size_t>(view.rank);
    layout_.small_bytes = std::max(limits.small_bytes * size, 4 * BufferTable::bytes(view.size()));
    arenas_[rank] = &arena_;
    std::vector<GroupMemoryView> members(size);
    members[rank] = GroupMemoryView(arena_, heap_.take(GroupLayout::memory_bytes(size)), size, layout_);
    std::vector<int> hosts(size);
    std::iota(hosts.begin(), hosts.end(), 0);
    auto staging = std::make_unique<Staging>(heap_.small_pool(layout_, size), heap_.slots_pool(layout_), members[rank],
                                             std::vector<GroupMemoryView>{});
    state_.emplace(CollectiveState{.rank = view.rank,
                                   .layout = layout_,
                                   .members = std::move(members),
                                   .arenas = &arenas_,
                                   .staging = std::move(staging),
                                   .sources = std::vector<const void*>(size),
                                   .direct_bytes = 0,
                                   .exchanged_bytes = 8000,
                                   .peers = std::vector<const PeerMemory*>(size),
                                   .reading = {},
                                   .topology = Topology(hosts, view.rank)});
    if (size == 1) return;
    state_->messages.emplace(messages, mutex_, [&messages] { return messages.pump(); }, view, limits);
    Proxies::attach(*state_, arena_, heap_.take(Proxies::bytes(state_->topology)));
    state_->relay = std::make_shared<Relay>(*state_);
  }

  CollectiveState& state() { return *state_; }
  const GroupView& group() const { return view_; }

 private:
  const GroupView view_;
  GroupLayout layout_;
  Arena arena_ = Arena::create_private(0);
  GroupHeap heap_{arena_};
  std::vector<const Arena*> arenas_;
  std::mutex mutex_;
  std::optional<CollectiveState> state_;
};

inline Descriptor call_of(OpKind op, Dtype dtype, ReduceOp reduce_op, size_t count, int root = -1,
                          uint64_t sequence = 1) {
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
inline void fill_as(Bytes& array, int rank, unsigned seed) {
  for (size_t index = 0; index < array.size() / sizeof(Element); ++index) {
    const auto value = static_cast<Element>((index * 5 + static_cast<size_t>(rank) * 3 + seed) % 7 + 1);
    std::memcpy(array.data() + index * sizeof value, &value, sizeof value);
  }
}

// Sixteen-bit floats from 1 up, an ulp apart: their sums are exact as float32 and not as float16.
inline void fill_halves(Bytes& array, int rank, unsigned seed, uint16_t one) {
  for (size_t index = 0; index < array.size() / 2; ++index) {
    const auto value = static_cast<uint16_t>(one + (index * 5 + static_cast<size_t>(rank) * 3 + seed) % 61);
    std::memcpy(array.data() + index * 2, &value, 2);
  }
}

// What a rank contributes. Small numbers, so that every order of summation gives the same bits.
inline Bytes input_of(Dtype dtype, size_t count, int rank, unsigned seed = 0) {
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

inline void finish(CollectiveCall& operation, Messages& messages, Doorbell& doorbell) {
  pump_until(messages, doorbell, [&] {
    while (operation.advance() == Progress::kMoved) {
    }
    return operation.is_completed();
  });
}

// Until all that was sent has come to the other side. Nothing tells a sleeper that it has.
inline void flush(Messages& messages) {
  while (!messages.flushed()) {
    if (!messages.pump()) poll(nullptr, 0, 1);
  }
}

inline constexpr MessageKey kAnnouncements{kGroup, uint64_t{1} << 63};
inline MessageKey data_key(uint64_t sequence) { return {kGroup, uint64_t{1} << 63 | sequence << 2 | 1}; }

// The announcement of a rank as it travels: see collectives/relay.hpp.
inline Bytes entry_of(int rank, const Bytes& announced) {
  const uint32_t head[2] = {static_cast<uint32_t>(rank), static_cast<uint32_t>(announced.size())};
  Bytes entry(sizeof head);
  std::memcpy(entry.data(), head, sizeof head);
  entry.insert(entry.end(), announced.begin(), announced.end());
  return entry;
}

// What one rank calls: a request and the arrays behind it. `array` is input and output; blocks have arrays of their
// own.
struct TestCall {
  TestCall() = default;
  TestCall(const TestCall&) = delete;
  TestCall& operator=(const TestCall&) = delete;

  static std::unique_ptr<TestCall> in_place(const Descriptor& descriptor, int rank) {
    auto call = std::make_unique<TestCall>();
    call->request.descriptor = descriptor;
    call->array = input_of(descriptor.dtype, descriptor.count, rank);
    call->request.input = call->request.output = call->array.data();
    return call;
  }

  Request request;
  Bytes array;
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
};

// World ranks 3, 0 and 2 are group ranks 0, 1 and 2.
inline GroupView shuffled_group(int world_rank) {
  GroupView group{kGroup, 0, {3, 0, 2}};
  group.rank = group.group_rank(world_rank);
  return group;
}

}  // namespace procgroup::testing
