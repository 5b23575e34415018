// One call of a function of procgroup.functional, on arrays in memory: of NumPy's arrays, and of the buffers that XLA
// gives to a compiled function. A *device* has the arrays: host memory, or a GPU, where what is queued on a stream is
// done when the stream comes to it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "group/group.hpp"

namespace procgroup {

// A contiguous array in memory.
struct FlatArray {
  void* data;  // never null
  Dtype dtype;
  size_t count;
};
using FlatArrays = std::vector<FlatArray>;

// For one call of a group. Its functions throw OperationFailed, and std::runtime_error for errors of a GPU.
class CallDevice {
 public:
  CallDevice(Group& group, double seconds, LanguageRuntime& language)
      : group_(group), seconds_(seconds), language_(language) {}
  CallDevice(const CallDevice&) = delete;
  CallDevice& operator=(const CallDevice&) = delete;
  virtual ~CallDevice() = default;

  Group& group() const { return group_; }
  // Whether the call may run on after it has failed, so that it must not use XLA's memory.
  virtual bool needs_scratch() const { return false; }
  // Memory for the call, of one byte or more.
  virtual std::shared_ptr<std::byte[]> allocate(size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) const = 0;
  virtual void clear(void* at, size_t bytes) const = 0;
  // Make a collective, or send a message and receive another one.
  virtual void run(Request request) = 0;
  virtual void exchange(MessageRequest sent, MessageRequest received) = 0;

 protected:
  Group& group_;
  const double seconds_;
  LanguageRuntime& language_;
};

// The engine moves the elements.
class HostDevice final : public CallDevice {
 public:
  using CallDevice::CallDevice;
  std::shared_ptr<std::byte[]> allocate(size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) const override;
  void clear(void* at, size_t bytes) const override;
  void run(Request request) override;
  void exchange(MessageRequest sent, MessageRequest received) override;
};

struct FunctionalCall {
  OpKind op;        // kSend also receives
  int root = -1;    // of kSend the destination
  int source = -1;  // of kSend
  ReduceOp reduce_op = ReduceOp::kSum;
  double factor = 1.0;  // of PREMUL_SUM
  uint64_t tag = 0;     // of kSend
  uint32_t line = 0;    // number of the source line that calls, or was traced: see Recorder

  // Make the call of arrays of one dtype, side by side as procgroup.functional.fusing has them. One array is used where
  // it is; several are copied. Blocking; throws as the device's functions, and std::invalid_argument for results of
  // another size.
  void run(CallDevice& device, const FlatArrays& given, const FlatArrays& results) const;
};

}  // namespace procgroup
