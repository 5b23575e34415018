// Calls that MPI moves, against a stand-in whose ranks are threads: every operation gives what reduce() gives on plain
// arrays, to the bit, and writes nothing else.
#include "mpi/mpi_transfer.hpp"

#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "tests/check.hpp"
#include "tests/mpi/rank_call.hpp"
#include "tests/mpi/threads_as_mpi.hpp"

namespace procgroup::testing {
namespace {

constexpr Dtype kSomeDtypes[] = {Dtype::kBool,    Dtype::kInt8,     Dtype::kUint16,   Dtype::kInt32,
                                 Dtype::kInt64,   Dtype::kFloat16,  Dtype::kBfloat16, Dtype::kFloat32,
                                 Dtype::kFloat64, Dtype::kComplex64};
constexpr Dtype kMovedDtypes[] = {Dtype::kFloat8E5m2, Dtype::kBfloat16, Dtype::kInt32, Dtype::kComplex64,
                                  Dtype::kComplex128};
constexpr size_t kCounts[] = {0, 1, 5, 1000};

std::shared_ptr<const MpiLibrary> library(const MpiHandles& handles = mpi_handles()) {
  return std::make_shared<const MpiLibrary>("", handles);  // this program
}

void in_all_ranks(int size, const std::shared_ptr<const MpiLibrary>& mpi,
                  const std::function<void(const MpiCommunicator&)>& body) {
  const std::vector<Word> handles = ThreadsAsMpi::instance().make_world(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      CASE("rank %d of %d", rank, size);
      body({.library = mpi,
            .handle = handles[static_cast<size_t>(rank)],
            .rank = rank,
            .size = size,
            .largest_tag = kLargestTag});
    });
  for (std::thread& thread : threads) thread.join();
}

// Advance them in any order until all have completed; each has been started.
template <class Call>
void complete(std::vector<std::unique_ptr<Call>>& calls, std::minstd_rand& random) {
  while (!calls.empty()) {
    const auto chosen = calls.begin() + static_cast<ptrdiff_t>(random() % calls.size());
    if ((*chosen)->advance())
      calls.erase(chosen);
    else
      std::this_thread::yield();
  }
}

// One to four calls are pending at once.
void play(const std::vector<Case>& cases, const std::shared_ptr<const MpiLibrary>& mpi, int size) {
  in_all_ranks(size, mpi, [&](const MpiCommunicator& communicator) {
    std::minstd_rand random(test_seed(static_cast<unsigned>(communicator.rank + 1)));
    std::vector<std::unique_ptr<RankCall>> calls;
    for (size_t next = 0; next < cases.size(); ++next) {
      calls.push_back(std::make_unique<RankCall>(cases[next], communicator));
      if (calls.back()->advance()) calls.pop_back();
      if (calls.size() > random() % 4) complete(calls, random);
    }
    complete(calls, random);
  });
}

std::vector<Shares> shares_of(OpKind op) {
  if (row_of(op).sizes == Sizes::kPerRank) return {Shares::kEqual, Shares::kUneven};
  if (row_of(op).sizes == Sizes::kPerPair) return {Shares::kEqual, Shares::kUneven, Shares::kForLowerRanks};
  return {Shares::kEqual};
}

// The blocks in every place; the layout and the root are others each time.
void add_places(std::vector<Case>& cases, Case call, int size) {
  const bool has_blocks = has_input_blocks(call.op) || has_output_blocks(call.op);
  for (const Shares shares : shares_of(call.op))
    for (const InPlace in_place : {InPlace::kNone, InPlace::kAll, InPlace::kOddRanks}) {
      if (in_place == InPlace::kOddRanks && !has_blocks) continue;
      const uint64_t random = mixed(cases.size() + 1);
      call.shares = shares;
      call.in_place = in_place;
      call.layout = has_blocks ? static_cast<int>(random % 4) : 0;
      if (is_rooted(call.op)) call.root = static_cast<int>(random / 4 % static_cast<uint64_t>(size));
      cases.push_back(call);
    }
}

std::vector<Case> movements(int size) {
  std::vector<Case> cases;
  for (const OpKind op : {OpKind::kBroadcast, OpKind::kGather, OpKind::kAllGather, OpKind::kScatter, OpKind::kAllToAll})
    for (const Dtype dtype : kMovedDtypes)
      for (const size_t count : kCounts)
        for (int turn = 0; turn < 4; ++turn) add_places(cases, {.op = op, .dtype = dtype, .count = count}, size);
  return cases;
}

// Those that promise the order of the ranks take one way only, whatever the count.
std::vector<Case> reductions(int size, const std::vector<size_t>& counts) {
  std::vector<Case> cases;
  const auto add = [&](OpKind op, Dtype dtype, ReduceOp reduce_op) {
    const bool is_another = row_of(reduce_op).preparation == Preparation::kTruth;  // of what is prepared
    if (!supports(reduce_op, dtype) || is_another) return;
    Case call{.op = op, .dtype = dtype, .reduce_op = reduce_op};
    for (const size_t count : counts) {
      call.count = count;
      add_places(cases, call, size);
    }
    call.count = 5;
    call.in_rank_order = true;
    add_places(cases, call, size);
  };
  for (const OpKind op : {OpKind::kReduce, OpKind::kAllReduce, OpKind::kScan, OpKind::kExscan, OpKind::kReduceScatter})
    for (const Dtype dtype : kSomeDtypes)
      for (int code = 0; code < kReduceOps; ++code) add(op, dtype, static_cast<ReduceOp>(code));
  return cases;
}

void every_movement_arrives() {
  for (const int size : {1, 2, 3, 4}) play(movements(size), library(), size);
}

void every_reduction_gives_what_reduce_gives() {
  for (const int size : {1, 2, 3, 4}) play(reductions(size, {std::begin(kCounts), std::end(kCounts)}), library(), size);
}

// However MPI combines them, and on each rank otherwise.
void all_ranks_get_the_same_nans() {
  constexpr int kSize = 4;
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16, Dtype::kFloat32, Dtype::kFloat64})
    for (const ReduceOp reduce_op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const Case call{.op = OpKind::kAllReduce, .dtype = dtype, .count = 1000, .reduce_op = reduce_op};
      CASE("%s", call.text().c_str());
      std::array<Bytes, kSize> results;
      in_all_ranks(kSize, library(), [&](const MpiCommunicator& communicator) {
        Bytes& data = results[static_cast<size_t>(communicator.rank)] = given(call, communicator.rank, 0);
        Request request;
        request.descriptor.op = call.op;
        request.descriptor.dtype = dtype;
        request.descriptor.reduce_op = reduce_op;
        request.descriptor.count = call.count;
        request.input = request.output = data.data();
        MpiTransfer transfer(communicator, request, false);
        transfer.start(-1, 1);
        while (!has_completed(transfer)) std::this_thread::yield();
      });
      for (const Bytes& result : results) CHECK_EQUAL(result, results[0]);
    }
}

void mpi_goes_on_while_other_ranks_are_waited_for() {
  in_all_ranks(2, library(), [](const MpiCommunicator& communicator) {
    int64_t data = 5;
    Request request;
    request.descriptor.op = OpKind::kAllReduce;
    request.descriptor.dtype = Dtype::kInt64;
    request.descriptor.count = 1;
    request.input = request.output = &data;
    MpiTransfer transfer(communicator, request, false);
    transfer.start(-1, 1);
    while (!has_completed(transfer)) std::this_thread::yield();
    const int before = ThreadsAsMpi::instance().probes();
    CHECK(has_completed(transfer) && !transfer.is_pending() && data == 10);
    CHECK(ThreadsAsMpi::instance().probes() > before);
  });
}

void what_a_library_lacks_is_gathered() {
  MpiHandles lacking = mpi_handles();
  lacking.datatypes = {};
  play(reductions(3, {5}), library(lacking), 3);
  lacking = mpi_handles();
  lacking.operations = {};
  play(reductions(3, {5}), library(lacking), 3);
}

// A message between two ranks. Numbers of one remainder by the largest tag and one share a tag.
class Message {
 public:
  Message(const MpiCommunicator& communicator, int from, int to, uint64_t number)
      : number_(number), peer_(communicator.rank == from ? to : from) {
    const bool sends = communicator.rank == from;
    const size_t count = number % 5 * 100;
    const Case call{.op = OpKind::kAllToAll, .dtype = kMovedDtypes[number % std::size(kMovedDtypes)], .count = count};
    expected_ = given(call, from + static_cast<int>(number % 1000), to);
    memory_ = sends ? expected_ : Bytes(expected_.size(), kUntouched);
    request_.descriptor.op = sends ? OpKind::kSend : OpKind::kRecv;
    request_.descriptor.dtype = call.dtype;
    request_.descriptor.count = count;
    request_.input = request_.output = memory_.data();
    transfer_.emplace(communicator, request_, false);
    transfer_->start(peer_, number_);
  }
  bool advance() {
    CHECK(!is_started_ || transfer_->is_pending());
    is_started_ = true;
    const bool completed = has_completed(*transfer_);
    CHECK(transfer_->is_pending() == !completed);
    CASE("message %zu, peer %d", static_cast<size_t>(number_), peer_);
    if (completed) CHECK_EQUAL(memory_, expected_);
    return completed;
  }

 private:
  const uint64_t number_;
  const int peer_;
  bool is_started_ = false;
  Bytes memory_;
  Bytes expected_;
  Request request_;
  std::optional<MpiTransfer> transfer_;
};

struct Numbered {
  int from;
  int to;
  uint64_t number;
};

// Only messages of one tag, between the same ranks, must start in the same order on both.
void messages_find_each_other_by_number() {
  constexpr uint64_t kFirst = uint64_t{1} << 40;
  in_all_ranks(3, library(), [&](const MpiCommunicator& communicator) {
    std::minstd_rand random(test_seed(static_cast<unsigned>(communicator.rank + 1)));
    for (int turn = 0; turn < 50; ++turn) {
      CASE("turn %d", turn);
      std::vector<Numbered> numbered;
      for (uint64_t number = 0; number < 20; ++number)
        for (int from = 0; from < 3; ++from)
          for (int to = 0; to < 3; ++to)
            if (from != to && (from == communicator.rank || to == communicator.rank))
              numbered.push_back({from, to, kFirst + number});
      std::array<uint64_t, 9 * (kLargestTag + 1)> places{};
      for (uint64_t& place : places) place = random();
      std::ranges::stable_sort(numbered, {}, [&](const Numbered& one) {
        return places[static_cast<size_t>(one.from * 3 + one.to) * (kLargestTag + 1) + one.number % (kLargestTag + 1)];
      });
      std::vector<std::unique_ptr<Message>> messages;
      for (const Numbered& one : numbered) {
        auto message = std::make_unique<Message>(communicator, one.from, one.to, one.number);
        if (!message->advance()) messages.push_back(std::move(message));
      }
      complete(messages, random);
    }
  });
}

constexpr int64_t kErrorWaitNs = 1'000'000'000;  // which the transfer gives the engine to find a lost process

// "" when there is none for so long.
std::string error_within(int64_t watched_ns, MpiTransfer& transfer) {
  const int64_t begin = now_ns();
  try {
    while (now_ns() - begin < watched_ns) {
      CHECK(!has_completed(transfer));
      std::this_thread::yield();
    }
  } catch (const std::runtime_error& error) {
    CHECK(now_ns() - begin > kErrorWaitNs);
    return error.what();
  }
  return "";
}

struct MpiError {
  int at_start;
  int at_test;
};

// In a call of two ranks, of which one comes.
void check_error_of_all_reduce(const MpiError& error, const std::string& expected_text) {
  CASE("error %d at the start, %d at the test", error.at_start, error.at_test);
  const Word handle = ThreadsAsMpi::instance().make_world(2)[0];
  const MpiCommunicator communicator{.library = library(), .handle = handle, .rank = 0, .size = 2};
  int64_t data = 5;
  Request request;
  request.descriptor.op = OpKind::kAllReduce;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = 1;
  request.input = request.output = &data;
  MpiTransfer transfer(communicator, request, false);
  transfer.start(-1, 1);
  CHECK(!transfer.is_pending());
  ThreadsAsMpi::instance().set_errors(handle, error.at_start, 0);
  if (error.at_test != 0) CHECK(!has_completed(transfer));
  ThreadsAsMpi::instance().set_errors(handle, error.at_start, error.at_test);
  CHECK(error_within((expected_text.empty() ? 2 : 60) * kErrorWaitNs, transfer) == expected_text);
  CHECK(transfer.is_pending());
  CHECK(data == 5);
}

void check_errors(const std::vector<MpiError>& errors, const std::string& expected_text) {
  std::vector<std::thread> threads;
  for (const MpiError& error : errors) threads.emplace_back([&] { check_error_of_all_reduce(error, expected_text); });
  for (std::thread& thread : threads) thread.join();
}

void an_error_of_mpi_is_thrown_a_second_later_with_its_text() {
  check_errors({{15, 0}, {0, 15}}, "MPI: " + std::string(kErrorText));
}

void a_call_of_a_lost_process_never_completes() {
  std::vector<MpiError> errors;
  for (const int lost : mpi_handles().lost) errors.insert(errors.end(), {{lost, 0}, {0, lost}});
  check_errors(errors, "");
}

void finalizing_waits_no_longer_than_it_may() {
  const auto mpi = library();
  CHECK(!mpi->finalize(0.01) && !mpi->finalize(0));
  ThreadsAsMpi::instance().end_others();
  CHECK(mpi->finalize(60) && mpi->finalize(0));
  CHECK(ThreadsAsMpi::instance().finalized() == 1);
}

void a_library_that_is_not_loaded_is_refused() {
  try {
    const MpiLibrary absent("/no/such/libmpi.so", mpi_handles());
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()) == "/no/such/libmpi.so is not loaded");
  }
}

void more_elements_than_the_library_counts_are_too_large() {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max();
  const auto mpi = library();
  CHECK(mpi->has_large_counts() == (sizeof(Count) == 8));
  const auto is_too_large = [&](size_t count, const std::vector<size_t>& inputs, const std::vector<size_t>& outputs) {
    Request request;
    request.descriptor.count = count;
    for (const size_t input : inputs) request.inputs.push_back({nullptr, input});
    for (const size_t output : outputs) request.outputs.push_back({nullptr, output});
    return MpiTransfer::is_too_large(*mpi, request);
  };
  CHECK(!is_too_large(kMost, {}, {}));
  CHECK(!is_too_large(0, {kMost - 5, 5}, {5, kMost - 5}));
  CHECK(is_too_large(kMost + 1, {}, {}) == !mpi->has_large_counts());
  CHECK(is_too_large(0, {kMost, 1}, {}) == !mpi->has_large_counts());
  CHECK(is_too_large(0, {}, {1, kMost}) == !mpi->has_large_counts());
  Request gathered;  // each rank's block of all ranks
  gathered.descriptor.op = OpKind::kReduceScatter;
  gathered.inputs = {{nullptr, kMost / 2}, {nullptr, 1}, {nullptr, 1}};
  CHECK(MpiTransfer::is_too_large(*mpi, gathered) == !mpi->has_large_counts());
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(every_movement_arrives);
  RUN_TEST(every_reduction_gives_what_reduce_gives);
  RUN_TEST(all_ranks_get_the_same_nans);
  RUN_TEST(mpi_goes_on_while_other_ranks_are_waited_for);
  RUN_TEST(what_a_library_lacks_is_gathered);
  RUN_TEST(messages_find_each_other_by_number);
  RUN_TEST(an_error_of_mpi_is_thrown_a_second_later_with_its_text);
  RUN_TEST(a_call_of_a_lost_process_never_completes);
  RUN_TEST(finalizing_waits_no_longer_than_it_may);
  RUN_TEST(a_library_that_is_not_loaded_is_refused);
  RUN_TEST(more_elements_than_the_library_counts_are_too_large);
}
