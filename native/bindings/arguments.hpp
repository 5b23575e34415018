// The arguments of one call: arrays become blocks of memory, and everything is checked before a byte moves.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "array_view.hpp"
#include "base/iovec.hpp"
#include "group/group.hpp"
#include "python_engine.hpp"

namespace procgroup {

// A reduce op as Python gives it: its number, or an object with a factor for PREMUL_SUM.
struct Reduction {
  ReduceOp op;
  double factor = 1.0;
};

// The call site for errors: the beginning of every text, and the functions that raise. Each error says what was
// expected and what was given.
class CallSite {
 public:
  CallSite(const char* function, const Group& group) : function_(function), group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  [[noreturn]] void refuse(const std::string& text) const;        // ArgumentError: a ValueError and a RuntimeError
  [[noreturn]] void refuse_value(const std::string& text) const;  // ValueError
  [[noreturn]] void refuse_type(const std::string& text) const;   // TypeError

  // Lists, ranks, reduce ops and split sizes are checked in groups/checks.py, which has the error texts. This raises
  // where a caller has not done that.
  void require_checked(bool is_right, const char* name) const;
  int checked_rank(int rank) const;
  int checked_peer(int peer, const std::string& side) const;  // a rank other than this one
  Reduction reduction(nb::handle op, Dtype dtype) const;
  // The arrays of a call are all in host memory, or all on one device.
  void require_one_place(const ArrayView& first, const ArrayView& other) const;

 private:
  std::string sentence(const std::string& text) const;

  const char* function_;
  const Group& group_;
};

// The arrays of one call with several, kept in `issued()` for as long as it runs.
class Arguments {
 public:
  Arguments(const CallSite& site, size_t arrays) : site_(site), issued_(std::make_shared<Issued>()) {
    issued_->arrays.reserve(arrays);  // references to views stay valid
  }

  // One array, which is at `index` of a list if that is not negative.
  const ArrayView& one(nb::handle array, Access access, const char* name, int index = -1);
  // One block per rank, all of one dtype with what was read before. Names are those of the parameter.
  std::vector<Block> list(nb::handle arrays, Access access, const char* name);
  // An array of one equal block per rank; its size has been checked.
  std::vector<Block> equal_blocks(const ArrayView& whole) const;
  // The rows of an array, so many for each rank; None: as many for all.
  std::vector<Block> rows(const ArrayView& whole, nb::handle splits, const char* name) const;

  // Refuse outputs that overlap with each other, or with an input that is not this rank's own block.
  void require_disjoint(const std::vector<Block>& inputs, const std::vector<Block>& outputs,
                        bool may_share_own = true) const;

  Dtype dtype() const { return issued_->arrays.front().dtype(); }
  std::shared_ptr<Issued> issued() const { return issued_; }

 private:
  void require_alike() const;
  void require_outputs_apart() const;
  [[noreturn]] void refuse_overlap() const;

  const CallSite& site_;
  std::shared_ptr<Issued> issued_;
};

// Python buffers that together are one array of bytes to be read, held for as long as it is used.
class InputIovecs {
 public:
  // `buffers[i]` begins at `offsets[i]` of an array of `bytes` bytes. Throws nb::value_error for buffers that are not
  // in order or do not fit, and the exception of an object that has no buffer.
  InputIovecs(nb::handle buffers, nb::handle offsets, size_t bytes);
  InputIovecs(const InputIovecs&) = delete;
  InputIovecs& operator=(const InputIovecs&) = delete;
  ~InputIovecs();  // with the interpreter's lock held

  const std::vector<Iovec>& iovecs() const { return iovecs_; }
  // The whole array, with zeros where it has no value.
  std::unique_ptr<std::byte[]> pack() const;

 private:
  void add(nb::handle buffer, size_t offset);

  size_t bytes_;
  std::vector<Py_buffer> views_;
  std::vector<Iovec> iovecs_;
};

}  // namespace procgroup
