// Where the arrays of a compiled call are: in host memory, or on a GPU. What is queued on a GPU's stream is done when
// the stream comes to it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "group/group.hpp"

namespace procgroup {

// An array in memory, as one of XLA's.
struct XlaArray {
  void* data;  // never null
  Dtype dtype;
  size_t count;
};
using XlaArrays = std::vector<XlaArray>;

// For one call of a group. Its functions throw OperationFailed, and std::runtime_error for errors of a GPU.
class ArrayPlace {
 public:
  ArrayPlace(Group& group, double seconds, LanguageRuntime& language)
      : group_(group), seconds_(seconds), language_(language) {}
  ArrayPlace(const ArrayPlace&) = delete;
  ArrayPlace& operator=(const ArrayPlace&) = delete;
  virtual ~ArrayPlace() = default;

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
class HostPlace final : public ArrayPlace {
 public:
  using ArrayPlace::ArrayPlace;
  std::shared_ptr<std::byte[]> allocate(size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) const override;
  void clear(void* at, size_t bytes) const override;
  void run(Request request) override;
  void exchange(MessageRequest sent, MessageRequest received) override;
};

// The arrays of one dtype: `rows` rows, and in each of them the same part of every array, one after the other.
class Bundle {
 public:
  Bundle(ArrayPlace& place, const XlaArrays& arrays, size_t rows);

  Dtype dtype() const { return dtype_; }
  size_t width() const { return width_; }  // elements of a row
  size_t bytes() const { return rows_ * width_ * dtype_size(dtype_); }
  void* data() const { return scratch_ ? scratch_.get() : parts_.front().data; }
  std::vector<Block> rows() const;

  void pack() const;
  void unpack() const;

 private:
  template <class Copy>
  void for_each_part(Copy copy) const;

  const ArrayPlace& place_;
  Dtype dtype_;
  size_t rows_;
  size_t width_ = 0;
  std::vector<Block> parts_;              // of the first row
  std::shared_ptr<std::byte[]> scratch_;  // null where the only array is used where it is
};

}  // namespace procgroup
