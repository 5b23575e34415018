#include "cuda/gpu.hpp"

#include <sys/mman.h>

#include <array>
#include <map>
#include <memory>
#include <stdexcept>

namespace procgroup {
namespace {

constexpr int kNotReady = 600;
constexpr unsigned kNoTiming = 2;     // of an event
constexpr unsigned kNonBlocking = 1;  // of a stream
constexpr unsigned kPortable = 1;     // registered memory, for all GPUs
constexpr unsigned kReached = 0;      // CU_STREAM_WAIT_VALUE_GEQ
constexpr int kDeviceOrdinal = 9;     // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kInvalidated = 2;       // CU_STREAM_CAPTURE_STATUS_INVALIDATED
constexpr unsigned kNoSync = 1;       // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
constexpr unsigned kMove = 1;         // CU_GRAPH_USER_OBJECT_MOVE
constexpr size_t kPageBytes = 65536;
constexpr size_t kWordBytes = 64;  // a word has a cache line of its own

// Lets this thread make calls that could disturb a capture, because they concern nothing of it.
class BesideCaptures {
 public:
  explicit BesideCaptures(const CudaDriver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const CudaDriver& driver_;
  int mode_ = kRelaxed;  // and then the thread's own
};

}  // namespace

Gpu& Gpu::get(int number) {
  static std::mutex mutex;
  static auto* const gpus = new std::map<int, std::unique_ptr<Gpu>>;  // never destroyed: threads outlive the end
  const std::lock_guard lock(mutex);
  std::unique_ptr<Gpu>& gpu = (*gpus)[number];
  if (gpu == nullptr) gpu.reset(new Gpu(number));
  return *gpu;
}

Gpu::Gpu(int number) : driver_(CudaDriver::get()), number_(number) {
  const int count = driver_.count();
  if (number >= count)
    throw std::runtime_error("there is no GPU " + std::to_string(number) + ": this process has " +
                             std::to_string(count) + ", which are numbered from 0");
  driver_.require(driver_.cuDeviceGet(&device_, number));
  driver_.require(driver_.cuDevicePrimaryCtxRetain(&context_, device_));
}

std::string Gpu::uuid() const {
  std::array<char, 16> bytes{};
  driver_.require(driver_.cuDeviceGetUuid(bytes.data(), device_));
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<uint8_t>(byte) >> 4];
    text += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

std::string Gpu::name() const {
  std::array<char, 256> text{};
  driver_.require(driver_.cuDeviceGetName(text.data(), static_cast<int>(text.size()), device_));
  return text.data();
}

bool Gpu::can_reach(const Gpu& other) const {
  int can = 0;
  driver_.require(driver_.cuDeviceCanAccessPeer(&can, device_, other.device_));
  return can != 0;
}

CudaStream Gpu::make_stream(bool has_high_priority) const {
  constexpr int kHighest = -100;  // the driver takes the nearest that there is
  CudaStream stream = nullptr;
  driver_.require(driver_.cuStreamCreateWithPriority(&stream, kNonBlocking, has_high_priority ? kHighest : 0));
  return stream;
}

void Gpu::destroy_stream(CudaStream stream) const { driver_.require(driver_.cuStreamDestroy(stream)); }

CudaEvent Gpu::record(CudaStream stream) {
  CudaEvent event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (event == nullptr) driver_.require(driver_.cuEventCreate(&event, kNoTiming));
  driver_.require(driver_.cuEventRecord(event, stream));
  return event;
}

void Gpu::give_back(CudaEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

void Gpu::let_wait(CudaStream stream, CudaEvent event) const {
  driver_.require(driver_.cuStreamWaitEvent(stream, event, 0));
}

bool Gpu::has_come(CudaEvent event) const {
  const BesideCaptures beside(driver_);
  const int result = driver_.cuEventQuery(event);
  if (result == kNotReady) return false;
  driver_.require(result);
  return true;
}

void Gpu::check(CudaStream stream) const {
  const BesideCaptures beside(driver_);
  const int result = driver_.cuStreamQuery(stream);
  if (result != kNotReady) driver_.require(result);
}

void Gpu::synchronize() const {
  const BesideCaptures beside(driver_);
  driver_.require(driver_.cuCtxSynchronize());
}

void Gpu::copy(CudaStream stream, CudaAddress to, CudaAddress from, size_t bytes) const {
  driver_.require(driver_.cuMemcpyAsync(to, from, bytes, stream));
}

void Gpu::clear(CudaStream stream, CudaAddress address, size_t bytes) const {
  driver_.require(driver_.cuMemsetD8Async(address, 0, bytes, stream));
}

CudaAddress Gpu::allocate(CudaStream stream, size_t bytes) const {
  CudaMemoryPool pool = nullptr;
  driver_.require(driver_.cuDeviceGetMemPool(&pool, device_));
  CudaAddress address = 0;
  driver_.require(driver_.cuMemAllocFromPoolAsync(&address, bytes, pool, stream));
  return address;
}

void Gpu::free(CudaStream stream, CudaAddress address) const {
  driver_.require(driver_.cuMemFreeAsync(address, stream));
}

bool Gpu::is_capturing(CudaStream stream) const {
  if (stream == nullptr || stream == legacy_stream()) return false;  // it cannot be, and must not be asked meanwhile
  int status = 0;
  driver_.require(driver_.cuStreamGetCaptureInfo(stream, &status, nullptr, nullptr, nullptr, nullptr));
  if (status == kInvalidated) throw std::runtime_error("CUDA: the capture of this stream has failed");
  return status != 0;
}

void Gpu::keep_with_graph(CudaStream stream, std::shared_ptr<void> kept) const {
  int status = 0;
  uint64_t number = 0;
  CudaGraph graph = nullptr;
  driver_.require(driver_.cuStreamGetCaptureInfo(stream, &status, &number, &graph, nullptr, nullptr));
  auto held = std::make_unique<std::shared_ptr<void>>(std::move(kept));
  CudaUserObject object = nullptr;
  driver_.require(driver_.cuUserObjectCreate(
      &object, held.get(), [](void* pointer) { delete static_cast<std::shared_ptr<void>*>(pointer); }, 1, kNoSync));
  held.release();
  driver_.require(driver_.cuGraphRetainUserObject(graph, object, 1, kMove));
}

bool Gpu::has_words() {
  if (has_words_ != Tried::kNot) return has_words_ == Tried::kYes;
  const std::lock_guard lock(mutex_);
  if (has_words_ != Tried::kNot) return has_words_ == Tried::kYes;
  const bool works = try_words();
  has_words_ = works ? Tried::kYes : Tried::kNo;
  return works;
}

// With the mutex.
bool Gpu::try_words() {
  if (driver_.cuStreamWaitValue32 == nullptr || driver_.cuStreamWriteValue32 == nullptr) return false;
  try {
    add_words();
  } catch (const std::runtime_error&) {
    return false;
  }
  CudaStream stream = nullptr;
  if (driver_.cuStreamCreateWithPriority(&stream, kNonBlocking, 0) != 0) return false;
  const auto at = reinterpret_cast<CudaAddress>(words_.back());
  words_.pop_back();  // the stream may write it later
  const bool works =
      driver_.cuStreamWaitValue32(stream, at, 0, kReached) == 0 && driver_.cuStreamWriteValue32(stream, at, 1, 0) == 0;
  driver_.cuStreamDestroy(stream);
  return works;
}

// With the mutex.
void Gpu::add_words() {
  auto* const page = static_cast<std::byte*>(map_registered(kPageBytes));
  for (size_t at = 0; at < kPageBytes; at += kWordBytes) words_.push_back(reinterpret_cast<Word*>(page + at));
}

Gpu::Word* Gpu::take_word() {
  const std::lock_guard lock(mutex_);
  if (words_.empty()) add_words();
  Word* const word = words_.back();
  words_.pop_back();
  word->store(0, std::memory_order_relaxed);
  return word;
}

void Gpu::give_back(Word* word) {
  const std::lock_guard lock(mutex_);
  words_.push_back(word);
}

void Gpu::let_wait(CudaStream stream, const Word* word, uint32_t value) const {
  driver_.require(driver_.cuStreamWaitValue32(stream, reinterpret_cast<CudaAddress>(word), value, kReached));
}

void Gpu::write(CudaStream stream, Word* word, uint32_t value) const {
  driver_.require(driver_.cuStreamWriteValue32(stream, reinterpret_cast<CudaAddress>(word), value, 0));
}

OnGpu::OnGpu(const Gpu& gpu) : driver_(gpu.driver_) {
  driver_.require(driver_.cuCtxGetCurrent(&before_));
  is_other_ = before_ != gpu.context_;
  if (is_other_) driver_.require(driver_.cuCtxSetCurrent(gpu.context_));
}

OnGpu::~OnGpu() {
  if (is_other_) driver_.cuCtxSetCurrent(before_);
}

void* map_registered(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the host has no memory that GPUs could copy from and to");
  const CudaDriver& driver = CudaDriver::get();
  const BesideCaptures beside(driver);
  try {
    driver.require(driver.cuMemHostRegister(memory, bytes, kPortable));
  } catch (const std::runtime_error&) {
    munmap(memory, bytes);
    throw;
  }
  return memory;
}

void unmap_registered(void* memory, size_t bytes) {
  const BesideCaptures beside(CudaDriver::get());
  CudaDriver::get().cuMemHostUnregister(memory);
  munmap(memory, bytes);
}

int gpu_of_stream(CudaStream stream) {
  const CudaDriver& driver = CudaDriver::get();
  CudaContext context = nullptr, before = nullptr;
  driver.require(driver.cuStreamGetCtx(stream, &context));
  driver.require(driver.cuCtxGetCurrent(&before));
  driver.require(driver.cuCtxSetCurrent(context));
  int number = 0;
  const int result = driver.cuCtxGetDevice(&number);
  driver.require(driver.cuCtxSetCurrent(before));
  driver.require(result);
  return number;
}

int gpu_of(CudaAddress address) {
  const CudaDriver& driver = CudaDriver::get();
  int number = 0;
  driver.require(driver.cuPointerGetAttribute(&number, kDeviceOrdinal, address));
  return number;
}

}  // namespace procgroup
