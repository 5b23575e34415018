// A stand-in for an MPI library, exported by a test program, whose ranks are threads. It moves and reduces as MPI may,
// and ends the program where a rank does what MPI forbids (mpi_call.hpp). One source of the program includes this file,
// which defines the functions.
//
//     MPI_Iallreduce   the arguments join those of the other ranks in a `Call`: the n-th collective of all ranks, or
//                      the n-th message of one sender, receiver and tag
//     MPI_Test         some tests, as many as chance says, find nothing; then, once all ranks have come, the first one
//                      moves everything
//     MPI_Iprobe       finds nothing, and is counted
//
// Handles and counts have 32 bits; with PROCGROUP_LARGE_COUNTS both have 64, and the functions are those of MPI 4.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/mpi/mpi_call.hpp"

#ifdef PROCGROUP_LARGE_COUNTS
#define COUNTING(name) name##_c
#else
#define COUNTING(name) name
#endif

namespace procgroup::testing {

inline constexpr Handle kNoRequest = kFirstHandle;
inline constexpr Handle kCommunicators = kFirstHandle + 0x10000;
inline constexpr Handle kRequests = kFirstHandle + 0x1000000;
inline constexpr int kLargestTag = 7;
inline constexpr size_t kStatusBytes = 24;
inline constexpr uint64_t kMostLooks = 4;

inline Word word_of(Handle handle) { return static_cast<Word>(static_cast<std::make_unsigned_t<Handle>>(handle)); }

inline MpiHandles mpi_handles() {
  MpiHandles handles{.in_place = reinterpret_cast<const void*>(kInPlace), .lost = {54, 56}};
  for (int code = 0; code <= static_cast<int>(Dtype::kComplex128); ++code) {
    const auto dtype = static_cast<Dtype>(code);
    if (dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16) continue;
    handles.datatypes[static_cast<size_t>(code)] =
        word_of(kTypes + (dtype == Dtype::kBool ? static_cast<int>(Dtype::kUint8) : code));
  }
  for (size_t place = 0; place < handles.moved.size(); ++place)
    handles.moved[place] = word_of(kMovedTypes + static_cast<Handle>(place));
  for (int code = 0; code < kReduceOps; ++code)
    if (*row_of(static_cast<ReduceOp>(code)).mpi != '\0')
      handles.operations[static_cast<size_t>(code)] = word_of(kMpiOperations + code);
  return handles;
}

struct Communicator {
  int world;
  int rank;
  int size;
  std::minstd_rand random;
  int64_t collectives = 0;
  int error_at_start = 0;  // an error code that the functions return
  int error_at_test = 0;
};

inline constexpr int kErrorCodes = 5000;  // to which the error class is added
inline constexpr std::string_view kErrorText = "MPI_ERR_OTHER: out of ink";

class ThreadsAsMpi {
 public:
  static ThreadsAsMpi& instance() {
    static ThreadsAsMpi mpi;
    return mpi;
  }

  // The communicators of ranks 0, 1, ...
  std::vector<Word> make_world(int size) {
    const std::lock_guard lock(mutex_);
    std::vector<Word> handles;
    for (int rank = 0; rank < size; ++rank) {
      handles.push_back(word_of(kCommunicators + static_cast<Handle>(communicators_.size())));
      communicators_.push_back(
          {worlds_, rank, size, std::minstd_rand(static_cast<unsigned>(1 + worlds_ * 100 + rank))});
    }
    ++worlds_;
    return handles;
  }
  void set_errors(Word communicator, int at_start, int at_test) {
    const std::lock_guard lock(mutex_);
    Communicator& own = communicator_of(static_cast<Handle>(communicator));
    own.error_at_start = at_start == 0 ? 0 : kErrorCodes + at_start;
    own.error_at_test = at_test == 0 ? 0 : kErrorCodes + at_test;
  }

  int start(Handle communicator, Handle* request, const Arguments& arguments) {
    const std::lock_guard lock(mutex_);
    Communicator& own = communicator_of(communicator);
    const Key key{own.world, -1, -1, -1, own.collectives++};
    return join(own, request, key, static_cast<size_t>(own.size), static_cast<size_t>(own.rank), arguments);
  }
  int start_message(Handle communicator, Handle* request, int peer, int tag, const Arguments& arguments) {
    const std::lock_guard lock(mutex_);
    Communicator& own = communicator_of(communicator);
    arguments.demand(peer >= 0 && peer < own.size && tag >= 0 && tag <= kLargestTag, own.rank, "a rank and a tag");
    const bool sends = arguments.op == OpKind::kSend;
    Key key{own.world, sends ? own.rank : peer, sends ? peer : own.rank, tag, sends ? 0 : 1};
    key[4] = messages_[key]++;
    return join(own, request, key, 2, sends ? 0 : 1, arguments);
  }
  int test(Handle* request, int* flag) {
    const std::lock_guard lock(mutex_);
    const auto found = requests_.find(*request);
    if (found == requests_.end()) {
      std::fputs("MPI_Test: expected a request\n", stderr);
      std::abort();
    }
    Pending& pending = found->second;
    if (const int error = communicator_of(pending.communicator).error_at_test; error != 0) return error;
    *flag = 0;
    if (pending.looks > 0) --pending.looks;
    if (pending.looks > 0 || !pending.call->is_complete()) return 0;
    pending.call->move_once(operations_);
    requests_.erase(found);
    *flag = 1;
    *request = kNoRequest;
    return 0;
  }
  void probe(Handle communicator, int source, int tag, int* flag) {
    const std::lock_guard lock(mutex_);
    const Communicator& own = communicator_of(communicator);
    if (source < 0 || source >= own.size || tag < 0 || tag > kLargestTag) {
      std::fputs("MPI_Iprobe: expected a rank and a tag\n", stderr);
      std::abort();
    }
    *flag = 0;
    ++probes_;
  }
  int probes() {
    const std::lock_guard lock(mutex_);
    return probes_;
  }
  // Waits until all processes would have called it.
  void finalize() {
    std::unique_lock lock(mutex_);
    ++finalized_;
    ended_.wait(lock, [this] { return others_have_ended_; });
  }
  void end_others() {
    const std::lock_guard lock(mutex_);
    others_have_ended_ = true;
    ended_.notify_all();
  }
  int finalized() {
    const std::lock_guard lock(mutex_);
    return finalized_;
  }
  int rank_of(Handle communicator) {
    const std::lock_guard lock(mutex_);
    return communicator_of(communicator).rank;
  }
  Handle create(OwnOperation operation) {
    const std::lock_guard lock(mutex_);
    operations_.push_back(operation);
    return kOwnOperations + static_cast<Handle>(operations_.size()) - 1;
  }

 private:
  // World, sender, receiver, tag and number.
  using Key = std::array<int64_t, 5>;
  struct Pending {
    std::shared_ptr<Call> call;
    Handle communicator;
    uint64_t looks;
  };

  Communicator& communicator_of(Handle handle) {
    return communicators_.at(static_cast<size_t>(handle - kCommunicators));
  }

  int join(Communicator& own, Handle* request, const Key& key, size_t size, size_t place, const Arguments& arguments) {
    if (own.error_at_start != 0) return own.error_at_start;
    std::shared_ptr<Call>& call = calls_[key];
    if (!call) call = std::make_shared<Call>(size, static_cast<unsigned>(calls_begun_++));
    call->join(place, arguments);
    *request = kRequests + static_cast<Handle>(requests_begun_++);
    const auto communicator = kCommunicators + static_cast<Handle>(&own - communicators_.data());
    const Pending& pending =
        requests_.emplace(*request, Pending{call, communicator, 1 + own.random() % kMostLooks}).first->second;
    if (pending.call->is_complete()) calls_.erase(key);
    return 0;
  }

  std::mutex mutex_;
  std::vector<Communicator> communicators_;
  std::map<Key, std::shared_ptr<Call>> calls_;  // that not all ranks have joined
  std::map<Key, int64_t> messages_;
  std::map<Handle, Pending> requests_;
  std::vector<OwnOperation> operations_;
  std::condition_variable ended_;
  bool others_have_ended_ = false;
  int finalized_ = 0;  // times
  int probes_ = 0;
  int worlds_ = 0;
  int64_t calls_begun_ = 1;
  int64_t requests_begun_ = 0;
};

inline int start_reduction(const char* function, OpKind op, const void* send, void* receive, Count count, Handle type,
                           Handle operation, int root, Handle communicator, Handle* request) {
  const Buffer input{const_cast<void*>(send), count, type};
  return ThreadsAsMpi::instance().start(communicator, request,
                                        {function, op, input, {receive, count, type}, root, operation});
}

inline int start_movement(const char* function, OpKind op, const Buffer& send, const Buffer& receive, int root,
                          Handle communicator, Handle* request) {
  return ThreadsAsMpi::instance().start(communicator, request, {function, op, send, receive, root});
}

}  // namespace procgroup::testing

extern "C" {

using procgroup::OpKind;
using procgroup::testing::Buffer;
using procgroup::testing::Count;
using procgroup::testing::Handle;
using procgroup::testing::start_movement;
using procgroup::testing::start_reduction;
using procgroup::testing::ThreadsAsMpi;

int COUNTING(MPI_Ibcast)(void* buffer, Count count, Handle type, int root, Handle communicator, Handle* request) {
  const Buffer both{buffer, count, type};
  return start_movement("MPI_Ibcast", OpKind::kBroadcast, both, both, root, communicator, request);
}
int COUNTING(MPI_Ireduce)(const void* send, void* receive, Count count, Handle type, Handle operation, int root,
                          Handle communicator, Handle* request) {
  return start_reduction("MPI_Ireduce", OpKind::kReduce, send, receive, count, type, operation, root, communicator,
                         request);
}
int COUNTING(MPI_Iallreduce)(const void* send, void* receive, Count count, Handle type, Handle operation,
                             Handle communicator, Handle* request) {
  return start_reduction("MPI_Iallreduce", OpKind::kAllReduce, send, receive, count, type, operation, -1, communicator,
                         request);
}
int COUNTING(MPI_Iscan)(const void* send, void* receive, Count count, Handle type, Handle operation,
                        Handle communicator, Handle* request) {
  return start_reduction("MPI_Iscan", OpKind::kScan, send, receive, count, type, operation, -1, communicator, request);
}
int COUNTING(MPI_Iexscan)(const void* send, void* receive, Count count, Handle type, Handle operation,
                          Handle communicator, Handle* request) {
  return start_reduction("MPI_Iexscan", OpKind::kExscan, send, receive, count, type, operation, -1, communicator,
                         request);
}
int COUNTING(MPI_Ireduce_scatter_block)(const void* send, void* receive, Count count, Handle type, Handle operation,
                                        Handle communicator, Handle* request) {
  return start_reduction("MPI_Ireduce_scatter_block", OpKind::kReduceScatter, send, receive, count, type, operation, -1,
                         communicator, request);
}
int COUNTING(MPI_Ireduce_scatter)(const void* send, void* receive, const Count* counts, Handle type, Handle operation,
                                  Handle communicator, Handle* request) {
  const Count own = counts[ThreadsAsMpi::instance().rank_of(communicator)];
  return ThreadsAsMpi::instance().start(communicator, request,
                                        {"MPI_Ireduce_scatter",
                                         OpKind::kReduceScatter,
                                         {const_cast<void*>(send), 0, type, counts},
                                         {receive, own, type},
                                         -1,
                                         operation});
}
int COUNTING(MPI_Igather)(const void* send, Count send_count, Handle send_type, void* receive, Count receive_count,
                          Handle receive_type, int root, Handle communicator, Handle* request) {
  return start_movement("MPI_Igather", OpKind::kGather, {const_cast<void*>(send), send_count, send_type},
                        {receive, receive_count, receive_type}, root, communicator, request);
}
int COUNTING(MPI_Iscatter)(const void* send, Count send_count, Handle send_type, void* receive, Count receive_count,
                           Handle receive_type, int root, Handle communicator, Handle* request) {
  return start_movement("MPI_Iscatter", OpKind::kScatter, {const_cast<void*>(send), send_count, send_type},
                        {receive, receive_count, receive_type}, root, communicator, request);
}
int COUNTING(MPI_Iallgather)(const void* send, Count send_count, Handle send_type, void* receive, Count receive_count,
                             Handle receive_type, Handle communicator, Handle* request) {
  return start_movement("MPI_Iallgather", OpKind::kAllGather, {const_cast<void*>(send), send_count, send_type},
                        {receive, receive_count, receive_type}, -1, communicator, request);
}
int COUNTING(MPI_Iallgatherv)(const void* send, Count send_count, Handle send_type, void* receive, const Count* counts,
                              const Count* offsets, Handle receive_type, Handle communicator, Handle* request) {
  return start_movement("MPI_Iallgatherv", OpKind::kAllGather, {const_cast<void*>(send), send_count, send_type},
                        {receive, 0, receive_type, counts, offsets}, -1, communicator, request);
}
int COUNTING(MPI_Ialltoallv)(const void* send, const Count* send_counts, const Count* send_offsets, Handle send_type,
                             void* receive, const Count* receive_counts, const Count* receive_offsets,
                             Handle receive_type, Handle communicator, Handle* request) {
  return start_movement("MPI_Ialltoallv", OpKind::kAllToAll,
                        {const_cast<void*>(send), 0, send_type, send_counts, send_offsets},
                        {receive, 0, receive_type, receive_counts, receive_offsets}, -1, communicator, request);
}
int COUNTING(MPI_Isend)(const void* buffer, Count count, Handle type, int destination, int tag, Handle communicator,
                        Handle* request) {
  return ThreadsAsMpi::instance().start_message(
      communicator, request, destination, tag,
      {"MPI_Isend", OpKind::kSend, {const_cast<void*>(buffer), count, type}, {}, tag});
}
int COUNTING(MPI_Irecv)(void* buffer, Count count, Handle type, int source, int tag, Handle communicator,
                        Handle* request) {
  return ThreadsAsMpi::instance().start_message(communicator, request, source, tag,
                                                {"MPI_Irecv", OpKind::kRecv, {}, {buffer, count, type}, tag});
}

int MPI_Test(Handle* request, int* flag, void* status) {
  std::memset(status, 0xff, procgroup::testing::kStatusBytes);
  return ThreadsAsMpi::instance().test(request, flag);
}
int MPI_Iprobe(int source, int tag, Handle communicator, int* flag, void* status) {
  std::memset(status, 0xff, procgroup::testing::kStatusBytes);
  ThreadsAsMpi::instance().probe(communicator, source, tag, flag);
  return 0;
}
int MPI_Finalize() {
  ThreadsAsMpi::instance().finalize();
  return 0;
}
int MPI_Op_create(procgroup::testing::OwnOperation operation, int /*commutes*/, Handle* created) {
  *created = ThreadsAsMpi::instance().create(operation);
  return 0;
}
int MPI_Reduce_local(const void* lower, void* both, int count, Handle type, Handle operation) {
  const auto op = static_cast<procgroup::ReduceOp>(operation - procgroup::testing::kMpiOperations);
  const auto dtype = static_cast<procgroup::Dtype>(type - procgroup::testing::kTypes);
  const void* const sources[] = {lower, both};
  const bool is_wrong = procgroup::testing::is_wrong(op, dtype);
  procgroup::reduce(is_wrong ? procgroup::Dtype::kInt16 : dtype, op, both, sources, 2, static_cast<size_t>(count));
  return 0;
}
int MPI_Error_class(int code, int* error_class) {
  *error_class = code - procgroup::testing::kErrorCodes;
  return 0;
}
int MPI_Error_string(int /*code*/, char* text, int* length) {
  *length = static_cast<int>(procgroup::testing::kErrorText.copy(text, procgroup::testing::kErrorText.size()));
  text[*length] = '\0';
  return 0;
}

}  // extern "C"
