// Stand-in GPUs, for tests on machines without one: memory, streams and events, as CUDA documents their order.
//
// Vocabulary: an *allocation* is device memory or pinned host memory. A device address lies in a reserved range
// that nobody may read or write, as on a real GPU: a host that dereferences it crashes. The bytes are elsewhere, in
// *backing* memory. Host memory that is no allocation is *pageable*. A *stream* is a queue and a thread that runs its
// work in order; a *position* is a stream and a number of its operations, and is reached when so many are complete.
// An event is a position. A *fault* is what a real GPU would call an illegal address, and is final. A *channel* is
// the hardware queue with the thread that runs it: each stream has its own, or shares one with other streams.
//
//      enqueue ──> [ work | work | wait for a position | work ] ──> thread of the channel ──> completed += 1
//
// Each operation starts PROCGROUP_STAND_IN_DELAY_US microseconds after its turn came, so that work that is not
// ordered after it runs first, and a test sees the wrong data. With PROCGROUP_STAND_IN_BURST_US=n a channel begins
// work only at multiples of n microseconds of the monotonic clock, and then runs all that is queued: completions come
// late, and many at once. With PROCGROUP_STAND_IN_CHANNELS=n the streams of one device and one priority share n
// channels, in turn as they are created; a channel runs the work of its streams in the order of the calls, so a wait
// on one stream holds up the other streams of its channel, as where a real GPU has more streams than channels.
// PROCGROUP_STAND_IN_STRICT_EVENTS=1 makes it a fault to record an event whose last recording is not reached yet:
// CUDA allows it, and who then asks for the end of the earlier work gets that of the later work.
//
// A *capture* takes what is queued on a stream, and on those that wait for its events, for a *graph* instead of running
// it: each of these streams is a *branch*. A launch queues the first branch on its stream, and each other one on a stream
// of the graph's own, so that branches wait for each other where they did in the capture, and nowhere else.
//
// One mutex guards everything, and one condition variable announces every completion: simple, and fast enough for
// tests. Nothing is freed at exit, because threads still run then.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace stand_in {

enum Result : int {  // CUresult
  kSuccess = 0,
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kAlreadyRegistered = 712,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

inline int64_t number_from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoll(text) : otherwise;
}

// The host's numbers of the GPUs that this process sees. CUDA_VISIBLE_DEVICES may name them, up to the first unknown one.
inline std::vector<int> visible_gpus() {
  const auto all = static_cast<int>(number_from_environment("PROCGROUP_STAND_IN_GPUS", 1));
  const char* named = std::getenv("CUDA_VISIBLE_DEVICES");
  std::vector<int> visible;
  if (named == nullptr) {
    for (int gpu = 0; gpu < all; ++gpu) visible.push_back(gpu);
    return visible;
  }
  std::istringstream names(named);
  for (std::string name; std::getline(names, name, ',') && !name.empty();) {
    const int gpu = std::atoi(name.c_str());
    if (gpu < 0 || gpu >= all) break;
    visible.push_back(gpu);
  }
  return visible;
}

// What the environment asks for, read once.
struct Settings {
  const int64_t delay = number_from_environment("PROCGROUP_STAND_IN_DELAY_US", 0);
  const int64_t burst = number_from_environment("PROCGROUP_STAND_IN_BURST_US", 0);
  const size_t channels = number_from_environment("PROCGROUP_STAND_IN_CHANNELS", 0);
  const bool has_strict_events = number_from_environment("PROCGROUP_STAND_IN_STRICT_EVENTS", 0) != 0;

  static const Settings& get() {
    static const Settings settings;
    return settings;
  }
};

struct Allocation {
  uintptr_t address;
  size_t bytes;
  int device;
  bool is_pinned_host;
  std::unique_ptr<std::byte[]> backing;  // null for the host's own memory, which was registered

  std::byte* at(uintptr_t where) const {
    return backing ? backing.get() + (where - address) : reinterpret_cast<std::byte*>(where);
  }
  bool contains(uintptr_t where, size_t count) const { return where >= address && where + count <= address + bytes; }
};

struct Stream;

struct Channel {
  struct Work {
    std::shared_ptr<Stream> stream;
    std::function<void()> function;
  };
  std::deque<Work> queue{};
  std::condition_variable filled{};
  bool is_closing = false;
};

struct Position {
  std::shared_ptr<Stream> stream;
  uint64_t count = 0;

  bool is_reached() const;
};

// The work of a graph: each launch makes what it queues, because NCCL numbers its work when it is launched.
struct Graph {
  using Make = std::function<std::function<void()>()>;
  // Work of a branch; without `make`, its wait for the first `count` steps of another one.
  struct Step {
    size_t branch;
    Make make;
    size_t other = 0, count = 0;
  };
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  std::vector<Step> steps{};
  std::vector<int> devices{};                       // by branch
  std::vector<std::shared_ptr<Stream>> streams{};   // of the branches but the first, made by the first launch
  Position last{};                                  // of the last launch
  std::vector<std::shared_ptr<void>> kept{};        // until the graph and what was made of it are destroyed
};

enum CaptureMode : int { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  uint64_t id;
  std::thread::id thread;
  CaptureMode mode;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  bool is_invalid = false;
  std::vector<const Stream*> branches{};
  std::vector<size_t> counts{};  // of the steps of each branch

  size_t branch_of(const Stream& stream);
  void add(const Stream& stream, Graph::Step step) {
    step.branch = branch_of(stream);
    ++counts[step.branch];
    graph->steps.push_back(std::move(step));
  }
};

struct Stream {
  int device;
  bool waits_for_legacy;  // created without CU_STREAM_NON_BLOCKING
  bool is_legacy = false;
  int priority = 0;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  std::shared_ptr<Channel> channel{};
  std::shared_ptr<Capture> capture{};
  bool began_capture = false;
  bool is_joined = true;  // nothing of the capture was queued here since a stream of it waited for an event here
};

inline bool Position::is_reached() const { return stream == nullptr || stream->completed >= count; }

inline size_t Capture::branch_of(const Stream& stream) {
  const auto found = std::find(branches.begin(), branches.end(), &stream);
  if (found != branches.end()) return found - branches.begin();
  branches.push_back(&stream);
  counts.push_back(0);
  graph->devices.push_back(stream.device);
  return branches.size() - 1;
}

// Guarded by the mutex of the devices, as streams are.
struct Event {
  Position position;
  std::chrono::steady_clock::time_point time{};
  std::weak_ptr<Capture> capture{};      // where it was recorded, in place of a position
  std::shared_ptr<Stream> captured_on{};  // then
  size_t captured_steps = 0;              // of the branch
};

class Devices {
 public:
  // Of the process, and never destroyed.
  static Devices& get() {
    static Devices* devices = new Devices;
    return *devices;
  }

  const std::vector<int> gpus = visible_gpus();
  const int count = static_cast<int>(gpus.size());

  // Return the address of new memory, filled with a pattern that no test takes for a result.
  uintptr_t allocate(size_t bytes, int device, bool is_pinned_host) {
    auto allocation = std::make_shared<Allocation>(Allocation{0, bytes, device, is_pinned_host, nullptr});
    allocation->backing = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::memset(allocation->backing.get(), 0xA5, bytes);
    allocation->address = is_pinned_host ? reinterpret_cast<uintptr_t>(allocation->backing.get()) : reserve(bytes);
    std::lock_guard lock(mutex_);
    allocations_[allocation->address] = allocation;
    return allocation->address;
  }

  // Make memory of the host pinned memory, until it is freed; return false where some of it is already.
  bool add_registered(uintptr_t address, size_t bytes, int device) {
    std::lock_guard lock(mutex_);
    auto next = allocations_.lower_bound(address);
    if (next != allocations_.end() && next->first < address + bytes) return false;
    if (next != allocations_.begin() && std::prev(next)->second->contains(address, 1)) return false;
    allocations_[address] = std::make_shared<Allocation>(Allocation{address, bytes, device, true, nullptr});
    return true;
  }

  bool free(uintptr_t address) {
    std::lock_guard lock(mutex_);
    auto found = allocations_.find(address);
    if (found == allocations_.end()) return false;
    if (!found->second->is_pinned_host) munmap(reinterpret_cast<void*>(address), found->second->bytes);
    allocations_.erase(found);
    return true;
  }

  // Return the allocation in which an address lies, or nothing for pageable memory.
  std::shared_ptr<Allocation> find(uintptr_t address) {
    std::lock_guard lock(mutex_);
    auto after = allocations_.upper_bound(address);
    if (after == allocations_.begin()) return nullptr;
    auto found = std::prev(after)->second;
    return address < found->address + found->bytes ? found : nullptr;
  }

  std::shared_ptr<Stream> create_stream(int device, bool waits_for_legacy, int priority) {
    auto stream = std::make_shared<Stream>(Stream{.device = device, .waits_for_legacy = waits_for_legacy});
    stream->priority = priority;
    std::lock_guard lock(mutex_);
    start(stream);
    return stream;
  }

  // Return a stream for its handle: 0 and 1 are the legacy default stream, 2 is the thread's default stream.
  std::shared_ptr<Stream> stream(void* handle, int device) {
    std::lock_guard lock(mutex_);
    if (reinterpret_cast<uintptr_t>(handle) <= 2) return default_stream(reinterpret_cast<uintptr_t>(handle), device);
    auto found = streams_.find(static_cast<Stream*>(handle));
    return found == streams_.end() ? nullptr : found->second;
  }

  // Let the stream's thread end once all its work is complete; does not wait for that, like CUDA.
  void destroy_stream(const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(mutex_);
    streams_.erase(stream.get());
    if (Settings::get().channels > 0) return;  // the channel is for other streams too
    stream->channel->is_closing = true;
    stream->channel->filled.notify_all();
  }

  Position enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (stream->capture != nullptr) return capture(*stream, [work = std::move(work)] { return work; }), Position{};
    return push_in_order(stream, std::move(work));
  }

  // Capture work that is made anew at each launch; false where the stream is not in a capture.
  bool enqueue_captured(const std::shared_ptr<Stream>& stream, Graph::Make make) {
    std::lock_guard lock(mutex_);
    if (stream->capture == nullptr) return false;
    capture(*stream, std::move(make));
    return true;
  }

  Result begin_capture(const std::shared_ptr<Stream>& stream, CaptureMode mode) {
    std::lock_guard lock(mutex_);
    if (stream->is_legacy) return kCaptureUnsupported;
    if (stream->capture != nullptr) return kInvalidValue;
    stream->capture = std::make_shared<Capture>(++captures_begun_, std::this_thread::get_id(), mode);
    stream->began_capture = true;
    stream->capture->branch_of(*stream);
    captures_.push_back(stream->capture);
    return kSuccess;
  }

  Result end_capture(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>& graph) {
    std::lock_guard lock(mutex_);
    const auto capture = stream->capture;
    if (capture == nullptr || !stream->began_capture) return capture == nullptr ? kInvalidValue : kCaptureUnmatched;
    if (capture->mode != kRelaxed && capture->thread != std::this_thread::get_id()) return kCaptureWrongThread;
    bool is_joined = true;
    for (auto& [key, other] : streams_) {
      if (other->capture != capture) continue;
      is_joined = is_joined && (other->began_capture || other->is_joined);
      other->capture = nullptr;
      other->began_capture = false;
      other->is_joined = true;
    }
    std::erase(captures_, capture);
    if (capture->is_invalid || !is_joined) return capture->is_invalid ? kCaptureInvalidated : kCaptureUnjoined;
    graph = capture->graph;
    return kSuccess;
  }

  std::shared_ptr<Capture> capture_of(const Stream& stream) {
    std::lock_guard lock(mutex_);
    return stream.capture;
  }

  // A look at the end of a stream: nothing of a capture runs.
  bool invalidates(const Stream& stream) {
    std::lock_guard lock(mutex_);
    if (stream.capture != nullptr) stream.capture->is_invalid = true;
    return stream.capture != nullptr;
  }

  // A call that CUDA forbids to threads that could disturb a capture: it invalidates the capture.
  bool disturbs_capture(CaptureMode mode) {
    std::lock_guard lock(mutex_);
    bool disturbs = false;
    for (const auto& capture : captures_) {
      const bool is_own = capture->thread == std::this_thread::get_id() && capture->mode != kRelaxed;
      if (mode == kRelaxed || !(is_own || (mode == kGlobal && capture->mode == kGlobal))) continue;
      capture->is_invalid = disturbs = true;
    }
    return disturbs;
  }

  // A graph that is launched again runs after itself.
  void launch(Graph& graph, const std::shared_ptr<Stream>& stream) {
    if (capture_of(*stream) != nullptr) {
      for (const auto& step : graph.steps)
        if (step.make) enqueue(stream, step.make());
      return;
    }
    for (size_t branch = graph.streams.size() + 1; branch < graph.devices.size(); ++branch)
      graph.streams.push_back(create_stream(graph.devices[branch], false, stream->priority));
    const auto wait_for = [this](const Position& position) { return [this, position] { wait(position); }; };
    std::vector<std::vector<Position>> ends(graph.devices.size());  // of the steps, by branch
    ends[0].push_back(enqueue(stream, wait_for(graph.last)));
    for (const auto& step : graph.steps) {
      const auto& target = step.branch == 0 ? stream : graph.streams[step.branch - 1];
      // The first branch has one step more, and every other one begins with a wait.
      const auto end = [&] { return ends[step.other][step.other == 0 ? step.count : step.count - 1]; };
      ends[step.branch].push_back(enqueue(target, step.make ? step.make() : wait_for(end())));
    }
    graph.last = ends[0].back();
  }

  // Let a stream wait for an event; into the capture where the event was recorded in one.
  Result let_wait(const std::shared_ptr<Stream>& stream, Event& event) {
    std::lock_guard lock(mutex_);
    if (event.captured_on != nullptr) {
      const auto capture = event.capture.lock();
      if (capture == nullptr || event.captured_on->capture != capture) return kCapturedEvent;
      if (stream->capture != nullptr && stream->capture != capture) return kCaptureMerge;
      if (stream->is_legacy) return capture->is_invalid = true, kCaptureImplicit;
      if (stream->capture == nullptr) stream->is_joined = false;
      stream->capture = capture;
      if (stream == event.captured_on) return kSuccess;
      const size_t other = capture->branch_of(*event.captured_on);
      capture->add(*stream, {.branch = 0, .make = nullptr, .other = other, .count = event.captured_steps});
      stream->is_joined = false;
      if (event.captured_steps == capture->counts[other]) event.captured_on->is_joined = true;
      return kSuccess;
    }
    if (stream->capture != nullptr) {
      stream->capture->is_invalid = true;
      return kCaptureIsolation;
    }
    push_in_order(stream, [this, position = event.position] { wait(position); });
    return kSuccess;
  }

  // Record an event on a stream; false where it is recorded again too early, and this is a fault.
  bool record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(mutex_);
    event->captured_on = stream->capture == nullptr ? nullptr : stream;
    event->capture = stream->capture;
    if (stream->capture != nullptr) {
      event->captured_steps = stream->capture->counts[stream->capture->branch_of(*stream)];
      return true;
    }
    if (Settings::get().has_strict_events && !event->position.is_reached()) {
      std::fputs("stand-in CUDA: cuEventRecord on an event whose last recording is not reached yet\n", stderr);
      has_fault = true;
      return false;
    }
    event->position = push_in_order(stream, [this, event] {
      std::lock_guard lock(mutex_);
      event->time = std::chrono::steady_clock::now();
    });
    return true;
  }

  Position position_of(const Event& event) {
    std::lock_guard lock(mutex_);
    return event.position;
  }

  bool is_captured(const Event& event) {
    std::lock_guard lock(mutex_);
    return event.captured_on != nullptr;
  }

  std::chrono::steady_clock::time_point time_of(const Event& event) {
    std::lock_guard lock(mutex_);
    return event.time;
  }

  void wait(const Position& position) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return position.is_reached(); });
  }

  bool is_reached(const Position& position) {
    std::lock_guard lock(mutex_);
    return position.is_reached();
  }

  Position end_of(const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(mutex_);
    return {stream, stream->submitted};
  }

  void synchronize(int device) {
    std::vector<Position> ends;
    {
      std::lock_guard lock(mutex_);
      for (auto& [key, stream] : streams_)
        if (stream->device == device) ends.push_back({stream, stream->submitted});
    }
    for (auto& end : ends) wait(end);
  }

  // Of the whole process, as a context's; final.
  std::atomic<bool> has_fault = false;

 private:
  static uintptr_t reserve(size_t bytes) {
    return reinterpret_cast<uintptr_t>(
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }

  // The functions below need the mutex.

  static void capture(Stream& stream, Graph::Make make) {
    stream.capture->add(stream, {.branch = 0, .make = std::move(make)});
    stream.is_joined = false;
  }

  void start(const std::shared_ptr<Stream>& stream) {
    streams_[stream.get()] = stream;
    stream->channel = channel_for(*stream);
  }

  std::shared_ptr<Channel> channel_for(const Stream& stream) {
    if (Settings::get().channels == 0) return new_channel();
    auto& [channels, streams] = channels_[{stream.device, stream.priority}];
    if (channels.size() < Settings::get().channels) channels.push_back(new_channel());
    return channels[streams++ % Settings::get().channels];
  }

  std::shared_ptr<Channel> new_channel() {
    auto channel = std::make_shared<Channel>();
    std::thread([this, channel] { work(*channel); }).detach();  // its work may never end, and the process shall
    return channel;
  }

  std::shared_ptr<Stream> default_stream(uintptr_t handle, int device) {
    const auto thread = handle == 2 ? std::this_thread::get_id() : std::thread::id{};
    auto& stream = default_streams_[{device, thread}];
    if (stream == nullptr) {
      stream = std::make_shared<Stream>(Stream{.device = device, .waits_for_legacy = handle == 2});
      stream->is_legacy = handle != 2;
      start(stream);
    }
    return stream;
  }

  // What the legacy default stream waits for, and who waits for it.
  std::vector<Position> implicit_predecessors(const Stream& stream) {
    std::vector<Position> positions;
    if (!stream.is_legacy && !stream.waits_for_legacy) return positions;
    for (auto& [key, other] : streams_) {
      const bool is_ordered =
          (stream.is_legacy && other->waits_for_legacy) || (stream.waits_for_legacy && other->is_legacy);
      if (is_ordered && other->device == stream.device && other->completed < other->submitted) {
        positions.push_back({other, other->submitted});
      }
    }
    return positions;
  }

  Position push_in_order(const std::shared_ptr<Stream>& stream, std::function<void()> work) {
    for (auto& other : implicit_predecessors(*stream)) push(stream, [this, other] { wait(other); });
    return push(stream, std::move(work));
  }

  Position push(const std::shared_ptr<Stream>& stream, std::function<void()> work) {
    stream->channel->queue.push_back({stream, std::move(work)});
    stream->channel->filled.notify_all();
    return {stream, ++stream->submitted};
  }

  void work(Channel& channel) {
    std::unique_lock lock(mutex_);
    while (true) {
      channel.filled.wait(lock, [&] { return !channel.queue.empty() || channel.is_closing; });
      if (channel.queue.empty()) return;
      if (Settings::get().burst > 0) {
        lock.unlock();
        sleep_until_burst();
        lock.lock();
      }
      for (auto count = Settings::get().burst > 0 ? channel.queue.size() : 1; count > 0; --count) {
        run_next(channel, lock);
      }
    }
  }

  void run_next(Channel& channel, std::unique_lock<std::mutex>& lock) {
    auto work = std::move(channel.queue.front());
    channel.queue.pop_front();
    lock.unlock();
    if (Settings::get().delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(Settings::get().delay));
    work.function();
    work.function = nullptr;
    lock.lock();
    ++work.stream->completed;
    changed_.notify_all();
  }

  static void sleep_until_burst() {
    const std::chrono::microseconds interval(Settings::get().burst);
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point((now / interval + 1) * interval));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uintptr_t, std::shared_ptr<Allocation>> allocations_;
  std::map<Stream*, std::shared_ptr<Stream>> streams_;
  std::map<std::pair<int, std::thread::id>, std::shared_ptr<Stream>> default_streams_;
  std::vector<std::shared_ptr<Capture>> captures_;
  uint64_t captures_begun_ = 0;
  // The shared channels of a device and priority, and how many streams they have got.
  std::map<std::pair<int, int>, std::pair<std::vector<std::shared_ptr<Channel>>, size_t>> channels_;
};

inline Graph::~Graph() {
  for (const auto& stream : streams) Devices::get().destroy_stream(stream);
}

}  // namespace stand_in
