#include "nccl/nccl_communicator.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/native_thread.hpp"

namespace procgroup {
namespace {

// How long an abort waits for threads that are inside of NCCL: it has told them, and they look again and again.
constexpr auto kLeaving = std::chrono::seconds(10);
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr int kInProgress = 7;

// The communicators of one group of ranks, which have to end, and what comes when they have been told.
struct Abort {
  std::vector<std::shared_ptr<NcclCommunicator>> communicators;
  std::function<void()> begin;
};

struct Aborts {
  std::mutex mutex;
  std::vector<Abort> requested;
  std::atomic<int> freeing{0};  // threads that end communicators
};
Aborts& aborts() {
  static auto* const aborts = new Aborts;  // never destroyed: threads run while the process ends
  return *aborts;
}

// One more while it lives.
struct Counted {
  explicit Counted(std::atomic<int>& number) : number_(number) { ++number_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --number_; }

  std::atomic<int>& number_;
};

}  // namespace

std::shared_ptr<NcclCommunicator> NcclCommunicator::connect(std::shared_ptr<const NcclLibrary> library, Gpu& gpu,
                                                            int size, int rank, const NcclId& id, std::string config) {
  const std::shared_ptr<NcclCommunicator> made(new NcclCommunicator(std::move(library), gpu));
  start_native_thread("pg-nccl", [made, size, rank, id, config = std::move(config)]() mutable {
    made->run(size, rank, id, config);
  }).detach();
  return made;
}

// Until the communicator has ended. Nothing else waits for this thread, which may be inside of NCCL for ever.
void NcclCommunicator::run(int size, int rank, const NcclId& id, std::string& config) {
  make(size, rank, id, config);
  for (;;) {
    std::function<void()> calls;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !posted_.empty() || state_ != State::kConnected; });
      if (state_ == State::kClosing) break;
      if (state_ != State::kConnected) return;
      calls = std::move(posted_.front());
      posted_.pop_front();
    }
    calls();
  }
  {
    const std::lock_guard calling(calling_);
    const OnGpu on_gpu(gpu_);
    library_->ncclCommDestroy(handle_);
  }
  let_go();
  const std::lock_guard lock(mutex_);
  state_ = State::kEnded;
  changed_.notify_all();
}

void NcclCommunicator::make(int size, int rank, const NcclId& id, std::string& config) {
  NcclHandle handle = nullptr;
  std::string error;
  try {
    const OnGpu on_gpu(gpu_);
    library_->require(library_->ncclCommInitRankConfig(&handle, size, id, rank, config.data()));
  } catch (const std::runtime_error& failed) {
    error = failed.what();
  }
  std::unique_lock lock(mutex_);
  if (state_ == State::kAborted) {  // the group has failed meanwhile
    lock.unlock();
    if (handle != nullptr) library_->ncclCommAbort(handle);
    return;
  }
  handle_ = handle;
  error_ = std::move(error);
  state_ = error_.empty() ? State::kConnected : State::kFailed;
}

bool NcclCommunicator::is_connected() {
  const std::lock_guard lock(mutex_);
  return is_usable();
}

// With the mutex.
bool NcclCommunicator::is_usable() const {
  if (state_ == State::kFailed) throw std::runtime_error(error_);
  if (state_ != State::kConnecting && state_ != State::kConnected)
    throw std::runtime_error("NCCL's communicator was aborted, because the group has failed");
  return state_ == State::kConnected;
}

NcclHandle NcclCommunicator::usable_handle() {
  const std::lock_guard lock(mutex_);
  if (!is_usable()) throw std::runtime_error("NCCL's communicator is not connected");
  return handle_;
}

void NcclCommunicator::post(std::function<void()> calls) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kConnected) return;  // what refers to this communicator must not be kept by it
  posted_.push_back(std::move(calls));
  changed_.notify_all();
}

void NcclCommunicator::check() {
  const std::unique_lock calling(calling_, std::try_to_lock);
  if (!calling) return;
  int state = 0;
  library_->require(library_->ncclCommGetAsyncError(usable_handle(), &state));
  if (state != kInProgress) library_->require(state);
}

void NcclCommunicator::keep(std::shared_ptr<const void> kept) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(kept));
}

void NcclCommunicator::let_go() {
  std::vector<std::shared_ptr<const void>> kept;  // let go of without the mutex
  const std::lock_guard lock(mutex_);
  kept.swap(kept_);
}

void NcclCommunicator::abort(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators,
                             std::function<void()> begin) {
  std::vector<std::shared_ptr<NcclCommunicator>> told;
  std::vector<std::deque<std::function<void()>>> ended;  // let go of without the mutex: that may run Python
  for (const std::shared_ptr<NcclCommunicator>& one : communicators) {
    const std::lock_guard lock(one->mutex_);
    if (one->state_ == State::kConnected) told.push_back(one);
    if (one->state_ == State::kConnected || one->state_ == State::kConnecting) one->state_ = State::kAborted;
    ended.push_back(std::exchange(one->posted_, {}));
    one->changed_.notify_all();
  }
  if (told.empty()) return begin();
  {
    const std::lock_guard lock(aborts().mutex);
    aborts().requested.push_back({std::move(told), std::move(begin)});
  }
  start_native_thread("pg-nccl-abort", end_aborted).detach();
}

bool NcclCommunicator::is_freeing() { return aborts().freeing != 0; }

// All that have been requested: another thread may find none.
void NcclCommunicator::end_aborted() {
  std::vector<Abort> requested;
  {
    const std::lock_guard lock(aborts().mutex);
    requested.swap(aborts().requested);
  }
  if (requested.empty()) return;
  const Counted freeing(aborts().freeing);
  std::vector<std::shared_ptr<NcclCommunicator>> told;
  for (const Abort& one : requested) told.insert(told.end(), one.communicators.begin(), one.communicators.end());
  const NcclLibrary& nccl = *told.front()->library_;
  nccl.ncclGroupStart();
  for (const std::shared_ptr<NcclCommunicator>& one : told) nccl.ncclCommAbort(one->handle_);
  for (const Abort& one : requested) one.begin();
  const auto until = std::chrono::steady_clock::now() + kLeaving;
  for (const std::shared_ptr<NcclCommunicator>& one : told) {
    std::unique_lock left(one->calling_, std::try_to_lock);
    while (!left && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(kPause);
      left.try_lock();
    }
    if (!left) return;  // a thread is still there: these communicators are never freed
  }
  nccl.ncclGroupEnd();
  for (const std::shared_ptr<NcclCommunicator>& one : told) one->let_go();
}

void NcclCommunicator::close(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::deque<std::function<void()>>> ended;
  for (const std::shared_ptr<NcclCommunicator>& one : communicators) {
    const std::lock_guard lock(one->mutex_);
    if (one->state_ == State::kConnecting) one->state_ = State::kAborted;
    if (one->state_ == State::kConnected) one->state_ = State::kClosing;
    ended.push_back(std::exchange(one->posted_, {}));
    one->changed_.notify_all();
  }
  for (const std::shared_ptr<NcclCommunicator>& one : communicators) {
    std::unique_lock lock(one->mutex_);
    one->changed_.wait_until(lock, until, [&] { return one->state_ != State::kClosing; });
  }
}

}  // namespace procgroup
