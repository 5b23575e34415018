// Errors of NCCL's, which the stand-in is asked for: of a call, of the work that is queued, and of a connection.
#include "tests/nccl/nccl_fixture.hpp"

using namespace procgroup;

namespace {

constexpr size_t kCount = 8;

// Issue calls until the group has ended; no stream is left waiting, and the rank that had the error names it.
void an_error_ends_the_group(OpKind op, double seconds, bool may_gate, const char* text) {
  NcclWorld world(2, may_gate);
  std::atomic<bool> is_named{false};
  world.in_all_ranks([&](NcclRank& mine) {
    const CudaStream stream = mine.make_stream();
    if (op != OpKind::kAllReduce) connect(mine, stream);
    DeviceArray given(mine.gpu(), stream, kCount), taken(mine.gpu(), stream, 2 * kCount);
    given.write(values(0, kCount));
    std::vector<IssuedCall> issued;
    try {
      for (int call = 0; call < 20; ++call) {
        std::vector<DeviceSpan> outputs{op == OpKind::kAllGather ? taken.part(0, kCount) : given.span()};
        if (op == OpKind::kAllGather) outputs.push_back(taken.part(kCount, kCount));
        issued.push_back(
            mine.issue({op, Dtype::kInt64, ReduceOp::kSum, 1, 0, {given.span()}, outputs}, {stream}, true, seconds));
      }
    } catch (const OperationFailed& failed) {
      if (failed.failure.summary().find(text) != std::string::npos) is_named = true;
    }
    int failures = 0;
    for (const IssuedCall& call : issued) {
      const Failure* failure = call.wait();
      if (failure == nullptr) continue;
      ++failures;
      if (failure->summary().find(text) != std::string::npos) is_named = true;
    }
    check(failures > 0, "expected a failure", mine.rank());
    mine.synchronize(stream);
  });
  check(is_named, text, 0);
}

}  // namespace

int main() {
  use_stand_ins();
  // Both ranks count together.
  setenv("PROCGROUP_STAND_IN_NCCL_FAIL",
         "broadcast:11:system,reduce:11:call-internal,allgather:11:hang,init:7:hang,init:9:remote", 1);
  RUN_TEST(an_error_ends_the_group, OpKind::kBroadcast, kLong, true, "unhandled system error");
  RUN_TEST(an_error_ends_the_group, OpKind::kReduce, kLong, true, "internal error");
  RUN_TEST(an_error_ends_the_group, OpKind::kAllGather, 1, true, "its GPU");
  RUN_TEST(an_error_ends_the_group, OpKind::kAllReduce, 0.5, true, "");  // a communicator that never connects
  RUN_TEST(an_error_ends_the_group, OpKind::kAllReduce, 2, true, "network error");
}
