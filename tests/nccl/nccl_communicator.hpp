// A stand-in communicator: the ranks of one host, connected in pairs by Unix sockets.
//
// Vocabulary: a *frame* is a header and its payload. On the *data* channel a header announces the operation for which
// the payload is, so that the receiver can compare it with its own; an *ack* ends a send; a *control* frame belongs to
// init, windows or finalize; a *failure* carries an error to the ranks that did not see it themselves. A *batch* is what
// one stream operation does: the operations of one group.
//
//      rank 0  <── socket ──>  rank 1          the thread of each communicator sorts arriving frames into queues,
//         \                     /              so that no writer ever waits for a reader's operation
//          `──>  rank 2  <─────´
//
// As in NCCL, batches run in the order in which they were issued, whatever their streams; a rank that dies leaves the
// others waiting; an operation that failed waits too; only abort ends them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "nccl_reduction.hpp"

namespace stand_in::nccl {

enum Status : int {  // ncclResult_t
  kSuccess,
  kUnhandledCudaError,
  kSystemError,
  kInternalError,
  kInvalidArgument,
  kInvalidUsage,
  kRemoteError,
  kInProgress,
  kTimeout,
};

// An error of a call, with what ncclGetLastError says.
struct Refused {
  Status status;
  std::string reason;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

void set_last_error(const std::string& reason);

// clang-format off
enum class Kind : int32_t {
  kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kRecv, kAck, kControl, kConnect, kFailure
};
// clang-format on

const char* name_of(Kind kind);

// Whether `from` has bytes for `to`.
bool sends(const struct Header& header, int from, int to);
bool is_reduction(Kind kind);
// Whether the call of a rank has a buffer for what it receives.
bool receives(const Header& header, int rank);

struct Header {
  Kind kind{};
  int32_t type = 0;
  int32_t reduction = 0;
  int32_t root = 0;
  uint64_t count = 0;
  uint64_t bytes = 0;
};

struct Frame {
  Header header;
  Bytes payload;
};

struct Operation {
  Header header;  // of a send or receive, `root` is the peer
  const void* send = nullptr;
  void* receive = nullptr;
  Bytes factor{};                   // of PreMulSum
  std::optional<Status> failure{};  // injected; kInProgress stands for a hang
};

class Communicator {
 public:
  Communicator(std::string id, int rank, int size, int device)
      : id(std::move(id)), rank(rank), size(size), device(device), peers_(size) {}
  ~Communicator() { close(); }

  const std::string id;
  const int rank;
  const int size;
  const int device;

  // Connect to all ranks; returns once all are there.
  void connect();

  // Let the other ranks know that this one is in its first collective; wait until all are, false after an abort.
  // NCCL connects the ranks then, and not before.
  void announce_collective();
  bool wait_for_collectives();

  // Return each rank's bytes, in rank order; nothing after an abort. All ranks must call it.
  std::optional<std::vector<Bytes>> gather(const Bytes& own);

  // Number the next batch. Its thread is to call run() with the number, unless it is withdrawn at once.
  uint64_t issue();
  void withdraw();
  void run(uint64_t number, const std::vector<Operation>& batch);

  // Wait until all batches are complete; false after an abort.
  bool flush();

  Status state();
  void fail(Status status, const std::string& reason);

  // End what waits here, and everything to come.
  void abort();
  // Wait after an abort, as NCCL, until the kernels of all communicators have left that now run on the GPU of this
  // one, and until the streams have come to all that was queued on this one.
  void wait_for_device();
  // Wait until no kernel of this communicator runs.
  void wait_for_kernels();
  // Kept by a graph into which work was captured. As NCCL's, the communicator does not end before the graph has.
  std::shared_ptr<void> keep_for_graph();
  void wait_for_graphs();
  // Wait for an abort, as whatever hangs does.
  void hang();

  std::map<int, Operation> factors;  // of PreMulSum, by the number of the reduction
  std::atomic<bool> is_finalized = false;

  // Memory that all ranks have registered together.
  void add_window(uintptr_t address, size_t bytes);
  bool is_in_window(const void* pointer);

 private:
  struct Peer {
    int socket = -1;
    std::deque<Frame> data;
    std::deque<Frame> control;
    uint64_t acks = 0;
    uint64_t empty_announced = 0;
    bool is_in_collective = false;
    std::mutex writing{};
  };

  void close();
  void end_reader();
  void read_all();
  void deliver(int peer, Frame frame);
  void write(int peer, Header header, const Bytes& payload);
  // Wait for a condition; false where an abort comes first.
  bool wait(const std::function<bool()>& is_met);

  void connect_to(int peer);
  void accept_from_higher_ranks(int listener);
  void refuse_shared_devices();

  void perform_or_fail(const std::vector<Operation>& batch);
  void perform(const std::vector<Operation>& batch);
  void leave_unbegun(const std::vector<Operation>& batch);
  void collective(const Operation& operation);
  void messages(const std::vector<Operation>& batch);
  Bytes contribution(const Operation& operation, int peer);
  Bytes matching(const Operation& operation, int peer);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::mutex joining_;  // guards the thread's handle: an abort may come from any thread
  std::thread reader_;
  std::atomic<bool> is_aborted_ = false;
  std::atomic<bool> is_announced_ = false;
  std::atomic<bool> is_connected_ = false;
  Status state_ = kSuccess;
  uint64_t issued_ = 0;
  uint64_t completed_ = 0;
  int running_ = 0;
  int graphs_ = 0;
  std::map<uintptr_t, size_t> windows_;
};

}  // namespace stand_in::nccl
