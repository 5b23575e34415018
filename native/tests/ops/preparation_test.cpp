// Reduce ops that prepare elements: what a call reads, and what comes out where one rank alone gives elements, which no
// kernel sees. Several arrays for one rank: what is joined, and what is copied back.
#include "ops/preparation.hpp"

#include <cstring>
#include <vector>

#include "dtype/preparation.hpp"
#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

constexpr ReduceOp kLogical[] = {ReduceOp::kLand, ReduceOp::kLor, ReduceOp::kLxor};

int64_t element(int rank, size_t index) { return (index >> rank) % 2 == 0 ? 0 : static_cast<int64_t>(index + 1) << 32; }

std::vector<int64_t> elements(int rank, size_t count) {
  std::vector<int64_t> data(count);
  for (size_t index = 0; index < count; ++index) data[index] = element(rank, index);
  return data;
}

int64_t truth_of(ReduceOp op, int sources, size_t index) {
  int given = 0;
  for (int rank = 0; rank < sources; ++rank) given += element(rank, index) != 0 ? 1 : 0;
  return op == ReduceOp::kLand ? given == sources : op == ReduceOp::kLor ? given != 0 : given % 2;
}

void logical_ops_give_0_and_1_whoever_gives_the_elements() {
  for (const int size : {1, 2, 3}) {
    std::vector<Rank> world = make_world(size);
    in_all_ranks(world, [size](Group& group) {
      NoRuntime language;
      for (const OpKind kind : {OpKind::kAllReduce, OpKind::kScan, OpKind::kExscan})
        for (const ReduceOp op : kLogical)
          for (const size_t count : {size_t{1}, size_t{1000}}) {
            CASE("%s(%s) of %zu", op_name(kind), reduce_op_name(op), count);
            std::vector<int64_t> data = elements(group.rank(), count);
            Request request = request_for(kind, data, -1, op);
            prepare(request);
            group.calls().run(request, 60, language);
            const int sources = sources_of(kind, group.rank(), size);
            for (size_t index = 0; index < count; ++index)
              check(data[index] == (sources == 0 ? element(group.rank(), index) : truth_of(op, sources, index)),
                    "a truth value, or on the first rank of an exscan what was there", group.rank());
          }
    });
  }
}

void integers_of_each_width_are_prepared_at_any_address() {
  for (const Dtype dtype : {Dtype::kInt8, Dtype::kUint16, Dtype::kInt32, Dtype::kUint64}) {
    CASE("%s", dtype_name(dtype));
    const size_t bytes = dtype_size(dtype);
    std::vector<unsigned char> memory(1 + 3 * bytes), out(1 + 3 * bytes, 0xA5);
    memory[1 + bytes - 1] = 0x80;  // the last byte alone
    memory[1 + bytes] = 1;
    check(needs_preparation(ReduceOp::kLand, dtype, 1.0), "is prepared", -1);
    prepare(ReduceOp::kLand, dtype, 1.0, out.data() + 1, memory.data() + 1, 3);
    std::vector<unsigned char> expected(1 + 3 * bytes);
    expected[0] = 0xA5;
    expected[1] = expected[1 + bytes] = 1;
    check(out == expected, "1, 1 and 0", -1);
  }
}

void a_request_whose_op_prepares_nothing_stays_as_it_is() {
  std::vector<int64_t> data(3);
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kBand}) {
    Request request = request_for(OpKind::kAllReduce, data, -1, op);
    prepare(request);
    check(request.input == data.data() && !request.before, "untouched", -1);
  }
  Request request = request_for(OpKind::kAllReduce, data, -1, ReduceOp::kLor);
  request.descriptor.dtype = Dtype::kBool;  // 0 or 1 already
  prepare(request);
  check(request.input == data.data() && !request.before, "untouched", -1);
}

// On rank 1 of 2: two arrays for rank 0, and three for the rank itself, of which one is empty.
Request rows_of_blocks(std::vector<int64_t>& given, std::vector<int64_t>& taken) {
  given = {1, 2, 3, 4, 5, 6};
  taken.assign(6, 0);
  Request request;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.splits = 1;
  const auto rows = [](std::vector<int64_t>& of) {
    return std::vector<Block>{{&of[4], 1}, {&of[0], 2}, {&of[2], 2}, {nullptr, 0}, {nullptr, 0}, {&of[5], 1}};
  };
  request.inputs = rows(given);
  request.outputs = rows(taken);
  return request;
}

void several_arrays_for_a_rank_become_one_block() {
  std::vector<int64_t> given, taken;
  Request request = rows_of_blocks(given, taken);
  join_blocks(request, 1, 2);
  request.before();
  CHECK_EQUAL(request.inputs.size(), size_t{2});
  CHECK_EQUAL(request.inputs[0].count, size_t{3});
  CHECK_EQUAL(request.inputs[0].announced(), joined_counts(1, 2));
  CHECK_EQUAL(announced_count(request.descriptor, joined_counts(1, 2)), uint64_t{3});
  CHECK_EQUAL(request.inputs[1].announced(), uint64_t{3});  // a rank compares its own arrays itself
  for (size_t rank = 0; rank < 2; ++rank)
    std::memcpy(request.outputs[rank].data, request.inputs[rank].data, request.outputs[rank].count * sizeof(int64_t));
  check(taken == std::vector<int64_t>(6), "nothing is written before the call has gone well", 1);
  request.after();
  check(taken == given, "every array got its elements", 1);
}

void one_array_that_is_not_empty_stays_where_it_is() {
  std::vector<int64_t> data(4);
  Request request;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.splits = 1;
  request.inputs = {{nullptr, 0}, {data.data(), 1}, {&data[1], 2}, {nullptr, 0}};
  request.outputs = {{&data[1], 2}, {data.data(), 1}, {nullptr, 0}, {nullptr, 0}};
  join_blocks(request, 1, 2);
  check(!request.before && !request.after, "no element is copied", 1);
  check(request.inputs[0].data == &data[1] && request.outputs[0].data == &data[1], "in place", 1);
  CHECK_EQUAL(request.inputs[0].announced(), joined_counts(0, 2));  // which is not what the other side expects
  CHECK_EQUAL(request.outputs[0].announced(), uint64_t{2});
}

void arrays_on_a_device_are_counted() {
  std::vector<int64_t> given, taken;
  Request request = rows_of_blocks(given, taken);
  join_blocks(request, 1, 2, true);
  check(!request.before && !request.after, "no element is copied", 1);
  CHECK_EQUAL(request.outputs[0].announced(), joined_counts(1, 2));
}

}  // namespace

int main() {
  RUN_TEST(logical_ops_give_0_and_1_whoever_gives_the_elements);
  RUN_TEST(integers_of_each_width_are_prepared_at_any_address);
  RUN_TEST(a_request_whose_op_prepares_nothing_stays_as_it_is);
  RUN_TEST(several_arrays_for_a_rank_become_one_block);
  RUN_TEST(one_array_that_is_not_empty_stays_where_it_is);
  RUN_TEST(arrays_on_a_device_are_counted);
}
