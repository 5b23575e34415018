// Calls of compiled functions on buffers as XLA gives them: a fake call frame, with several arrays in one call.
#include "xla/compiled_call.hpp"

#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine_fixture.hpp"
#include "tests/xla/fake_buffers.hpp"

using namespace procgroup;

namespace {

constexpr int kSize = 3;

void test_each_operation(size_t first, size_t second) {
  std::vector<Rank> world = make_world(kSize);
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast, OpKind::kAllGather,
                          OpKind::kReduceScatter, OpKind::kAllToAll, OpKind::kSend})
    in_all_ranks(world, [&](Group& group) {
      CASE("%s of %zu and %zu", op_name(op), first, second);
      const int rank = group.rank();
      const bool is_message = op == OpKind::kSend;
      const CompiledCall call({.op = op,
                               .root = is_message ? (rank + 1) % kSize : 1,
                               .source = is_message ? (rank + kSize - 1) % kSize : -1,
                               .tag = 5},
                              {Dtype::kInt32, Dtype::kUint8, Dtype::kInt32});
      const size_t given_rows = has_input_blocks(op) ? kSize : 1;
      const size_t result_rows = has_output_blocks(op) ? kSize : 1;
      const std::array<size_t, 2> counts{first, second};
      std::array<std::vector<int32_t>, 2> given;
      std::array<std::vector<int32_t>, 2> results;
      std::vector<uint8_t> other(given_rows, 1);
      std::vector<uint8_t> other_result(result_rows, 9);
      FakeBuffers arguments;
      FakeBuffers made;
      for (size_t which = 0; which < 2; ++which) {
        given[which] = elements<int32_t>(rank, given_rows * counts[which]);
        results[which].assign(result_rows * counts[which], -1);
        const auto count = static_cast<int64_t>(counts[which]);
        arguments.add(xla::type_of(Dtype::kInt32), given[which], {static_cast<int64_t>(given_rows), count});
        made.add(xla::type_of(Dtype::kInt32), results[which], {static_cast<int64_t>(result_rows), count});
        if (which == 0) {
          arguments.add(xla::type_of(Dtype::kUint8), other, {static_cast<int64_t>(given_rows)});
          made.add(xla::type_of(Dtype::kUint8), other_result, {static_cast<int64_t>(result_rows)});
        }
      }
      NoRuntime language;
      call.run(group, arguments.arrays(), made.arrays(), 20, language);
      for (size_t which = 0; which < 2; ++which) {
        CHECK(given[which] == elements<int32_t>(rank, given_rows * counts[which]));
        CHECK_EQUAL(results[which], expected<int32_t>(op, rank, kSize, counts[which]));
      }
      const bool adds = op == OpKind::kAllReduce || op == OpKind::kReduceScatter;
      const int sum = adds ? kSize : op != OpKind::kReduce ? 1 : rank == 1 ? kSize : 0;
      for (const uint8_t one : other_result) CHECK_EQUAL(static_cast<int>(one), sum);
    });
}

// The receive fails, because it gets a message of another size, while the message of the same call is still on its way.
// XLA's memory may be gone when another rank receives it.
void test_a_message_outlives_a_failed_exchange() {
  std::vector<Rank> world = make_world(2);
  constexpr size_t kLarge = size_t{1} << 20;
  std::atomic<bool> has_failed = false;
  in_all_ranks(world, [&](Group& group) {
    NoRuntime language;
    if (group.rank() == 1) {
      int32_t other = 0;
      group.messages().run({OpKind::kSend, &other, 1, Dtype::kInt32, 0, 5}, 20, language);
      while (!has_failed) std::this_thread::yield();
      std::vector<int32_t> got(kLarge);
      group.messages().run({OpKind::kRecv, got.data(), kLarge, Dtype::kInt32, 0, 5}, 20, language);
      CHECK(got == elements<int32_t>(0, kLarge));
      return;
    }
    auto given = std::make_unique<std::vector<int32_t>>(elements<int32_t>(0, kLarge));
    std::vector<int32_t> result(kLarge);
    FakeBuffers arguments;
    FakeBuffers made;
    arguments.add(xla::type_of(Dtype::kInt32), *given, {kLarge});
    made.add(xla::type_of(Dtype::kInt32), result, {kLarge});
    const CompiledCall call({.op = OpKind::kSend, .root = 1, .source = 1, .tag = 5}, {Dtype::kInt32});
    try {
      call.run(group, arguments.arrays(), made.arrays(), 20, language);
    } catch (const OperationFailed& failed) {
      CHECK(failed.failure.is<Mismatch>());
      given.reset();
      has_failed = true;
    }
    CHECK(has_failed);
    while (!group.is_idle()) std::this_thread::yield();
  });
}

template <class Call>
bool is_refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_other_frames_are_refused() {
  std::vector<Rank> world = make_world(1);
  std::vector<int32_t> data(4);
  FakeBuffers arguments;
  arguments.add(xla::type_of(Dtype::kInt32), data, {2, 2});
  CHECK_EQUAL(arguments.arrays().size(), size_t{1});
  CHECK_EQUAL(arguments.arrays()[0].count, size_t{4});
  NoRuntime language;
  const CompiledCall call({.op = OpKind::kAllReduce}, {Dtype::kFloat32});
  CHECK(is_refused([&] { call.run(*world[0].group, arguments.arrays(), arguments.arrays(), 1, language); }));
  FakeBuffers unknown;
  unknown.add(30, data, {4});
  CHECK(is_refused([&] { unknown.arrays(); }));

  xla::ByteSpan name{"call", 4};
  xla::ByteSpan* names[] = {&name};
  uint64_t number = 7;
  xla::Scalar scalar{xla::type_of(Dtype::kUint64), &number};
  void* values[] = {&scalar};
  xla::AttributeType types[] = {xla::AttributeType::kScalar};
  const xla::Attributes attributes{sizeof(xla::Attributes), nullptr, 1, types, names, values};
  CHECK_EQUAL(attribute_of(attributes, "call"), uint64_t{7});
  CHECK(is_refused([&] { attribute_of(attributes, "cal"); }));
}

void test_versions() {
  xla::Api api{sizeof(xla::Api), nullptr, {sizeof(xla::Version), nullptr, 0, 3}, nullptr, nullptr};
  xla::CallFrame frame{};
  frame.struct_size = sizeof frame;
  frame.api = &api;
  CHECK(!answer_metadata(frame));
  CHECK(misfit_of(frame).empty());
  api.version.minor = 4;
  CHECK(misfit_of(frame).empty());
  api.version.major = 1;
  CHECK(misfit_of(frame).find("this XLA has version 1.4") != std::string::npos);
  api.version = {sizeof(xla::Version), nullptr, 0, 3};
  frame.struct_size = offsetof(xla::CallFrame, attributes);
  CHECK(!misfit_of(frame).empty());

  xla::Metadata metadata{sizeof(xla::Metadata), {sizeof(xla::Version), nullptr, -1, -1}, 99};
  xla::MetadataExtension extension{{sizeof(xla::MetadataExtension), xla::ExtensionType::kMetadata, nullptr}, &metadata};
  frame.extensions = &extension.base;
  CHECK(!misfit_of(frame).empty());
  frame.struct_size = sizeof frame;
  CHECK(misfit_of(frame).empty());
  CHECK(answer_metadata(frame));
  CHECK_EQUAL(metadata.version.major, 0);
  CHECK_EQUAL(metadata.version.minor, 3);
  CHECK_EQUAL(metadata.traits, uint32_t{0});
  metadata.struct_size = offsetof(xla::Metadata, traits);
  CHECK(!misfit_of(frame).empty());
}

}  // namespace

int main() {
  RUN_TEST(test_each_operation, 5, 0);
  RUN_TEST(test_each_operation, 0, 0);
  RUN_TEST(test_each_operation, 3000, 17);
  RUN_TEST(test_a_message_outlives_a_failed_exchange);
  RUN_TEST(test_other_frames_are_refused);
  RUN_TEST(test_versions);
  return 0;
}
