// One GPU of this process: streams, events that order them, and words of memory that the GPU and the host share.
//
// A stream runs what is queued on it in order. An *event* is recorded on one stream; another stream that waits for it
// runs nothing before the first has come to the event. A *word* is 32 bits of host memory that a stream can wait for
// and write: cheaper than an event, and the host can write it, too.
//
// A stream in a *capture* runs nothing: what is queued on it becomes part of a graph, which the program launches later,
// and as often as it likes. Meanwhile CUDA forbids threads to ask for the end of any work; those of this library may.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/cuda_driver.hpp"
#include "ops/task.hpp"

namespace procgroup {

class Gpu {
 public:
  // That of a number; the same object for the life of the process. Throws std::runtime_error where there is none.
  static Gpu& get(int number);

  int number() const { return number_; }
  // The number by which NVIDIA tells this GPU apart from all others, in hexadecimal digits.
  std::string uuid() const;
  // The name of its model.
  std::string name() const;
  // Whether it reads and writes the memory of another one without the host.
  bool can_reach(const Gpu& other) const;

  // All that follows throws std::runtime_error for an error of the driver. This GPU is the current one of the thread:
  // see OnGpu.

  // A stream that does not wait for the legacy default stream.
  CudaStream make_stream(bool has_high_priority = false) const;
  void destroy_stream(CudaStream stream) const;
  // An event that is recorded on a stream. Give it back when it has come and nobody asks for it any more.
  CudaEvent record(CudaStream stream);
  void give_back(CudaEvent event);
  void let_wait(CudaStream stream, CudaEvent event) const;
  bool has_come(CudaEvent event) const;
  // Throw for an error of what has run on a stream.
  void check(CudaStream stream) const;
  // Wait for all that was queued on the GPU.
  void synchronize() const;
  // Queue a copy between places in the memory of the GPU, or in registered memory of the host.
  void copy(CudaStream stream, CudaAddress to, CudaAddress from, size_t bytes) const;
  // Queue that memory of the GPU becomes zero.
  void clear(CudaStream stream, CudaAddress address, size_t bytes) const;
  // Memory for what is queued on a stream from now on, until it is freed there.
  CudaAddress allocate(CudaStream stream, size_t bytes) const;
  void free(CudaStream stream, CudaAddress address) const;

  // Whether a stream is in a capture. Throws for one that has failed, too.
  bool is_capturing(CudaStream stream) const;
  // Keep something until the graph into which a stream is captured is destroyed, and what was made of it. It ends in a
  // thread of the driver's, which may not call CUDA.
  void keep_with_graph(CudaStream stream, std::shared_ptr<void> kept) const;

  using Word = std::atomic<uint32_t>;
  // Whether streams can wait for words and write them. Tried out at the first call.
  bool has_words();
  // A word, which is 0. Give it back when no stream waits for it or is to write it any more.
  Word* take_word();
  void give_back(Word* word);
  // Let a stream wait until the word has reached the value, or has passed it by less than 2^31.
  void let_wait(CudaStream stream, const Word* word, uint32_t value) const;
  void write(CudaStream stream, Word* word, uint32_t value) const;

 private:
  explicit Gpu(int number);
  friend class OnGpu;
  void add_words();
  bool try_words();

  const CudaDriver& driver_;
  const int number_;
  int device_ = 0;
  CudaContext context_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::vector<CudaEvent> events_;
  std::vector<Word*> words_;
  enum class Tried : uint8_t { kNot, kYes, kNo };
  std::atomic<Tried> has_words_{Tried::kNot};
};

// Makes a GPU the current one of this thread, until the end of the scope. The program has a choice of its own, which is
// put back.
class OnGpu {
 public:
  explicit OnGpu(const Gpu& gpu);
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu();

 private:
  const CudaDriver& driver_;
  CudaContext before_ = nullptr;
  bool is_other_;
};

// Memory of the host that GPUs copy from and to asynchronously; a forked child gets a copy of it. A GPU is the current
// one of the thread. Throws std::runtime_error where there is none.
void* map_registered(size_t bytes);
void unmap_registered(void* memory, size_t bytes);

// The GPU whose memory has this address. Throws std::runtime_error for other addresses.
int gpu_of(CudaAddress address);
// The GPU whose stream this is. Throws std::runtime_error for what is not a stream.
int gpu_of_stream(CudaStream stream);

// The memory of an array on a GPU, or of a block of one.
struct DeviceSpan {
  CudaAddress address = 0;
  size_t bytes = 0;

  bool operator==(const DeviceSpan&) const = default;
};

// A task whose work is queued on a GPU.
class DeviceTask : public Task {
 public:
  // Let what is queued on these streams from now on come after the task. Once it is queued; from any thread.
  virtual void let_wait(const std::vector<CudaStream>& streams) = 0;
  // The stream on which the whole task is queued; null before that, and where it is on several.
  virtual CudaStream queued_on() const { return nullptr; }
};

}  // namespace procgroup
