#include "arguments.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

namespace procgroup {
namespace {

std::string number(size_t value) { return std::to_string(value); }

uintptr_t begin_of(const Block& block) { return reinterpret_cast<uintptr_t>(block.data); }

}  // namespace

const ArrayView& Arguments::one(nb::handle array, Access access, const char* name, int index) {
  const ArrayView& view = issued_->arrays.emplace_back(array, access, ParameterName{name, index});
  require_alike();
  return view;
}

std::vector<Block> Arguments::list(nb::handle arrays, Access access, const char* name) {
  const size_t length = nb::len(arrays);
  site_.require_checked(length == static_cast<size_t>(site_.size()), name);
  std::vector<Block> blocks;
  blocks.reserve(length);
  for (size_t index = 0; index < length; ++index) {
    const nb::object array = arrays[index];
    const ArrayView& view = one(array, access, name, static_cast<int>(index));
    blocks.push_back({view.data(), view.count()});
  }
  return blocks;
}

void Arguments::require_alike() const {
  site_.require_one_place(issued_->arrays.front(), issued_->arrays.back());
  const Dtype first = issued_->arrays.front().dtype();
  const Dtype last = issued_->arrays.back().dtype();
  if (first == last) return;
  site_.refuse_value("Invalid usage of tensors with different dtypes: found " + std::string(dtype_name(first)) +
                     " and " + dtype_name(last) + "; pass arrays of one dtype");
}

std::vector<Block> Arguments::equal_blocks(const ArrayView& whole) const {
  const auto size = static_cast<size_t>(site_.size());
  const size_t count = whole.count() / size;
  std::vector<Block> blocks(size);
  for (size_t index = 0; index < size; ++index)
    blocks[index] = {static_cast<std::byte*>(whole.data()) + index * count * dtype_size(whole.dtype()), count};
  return blocks;
}

std::vector<Block> Arguments::rows(const ArrayView& whole, nb::handle splits, const char* name) const {
  const auto size = static_cast<size_t>(site_.size());
  const std::string parameter = std::string(name) + "_split_sizes";
  const bool equal = splits.is_none();
  if (equal && whole.rows() % size != 0)
    site_.refuse("`" + std::string(name) + "` has " + number(whole.rows()) + " rows, which " + number(size) +
                 " ranks cannot share equally; pass `" + parameter + "`");
  const std::vector<size_t> lengths =
      equal ? std::vector<size_t>(size, whole.rows() / size) : nb::cast<std::vector<size_t>>(splits);
  site_.require_checked(lengths.size() == size, parameter.c_str());
  size_t total = 0;
  for (const size_t length : lengths) {
    total = length > whole.rows() ? length : total + length;  // too much in any case, without an overflow
    if (length > whole.rows()) break;
  }
  if (total != whole.rows())
    site_.refuse("Split sizes doesn't match total dim 0 size: `" + parameter + "` sum to " + number(total) + ", but `" +
                 name + "` has " + number(whole.rows()) + " rows");
  const size_t row = whole.rows() == 0 ? 0 : whole.count() / whole.rows();
  std::vector<Block> blocks;
  auto* at = static_cast<std::byte*>(whole.data());
  for (const size_t length : lengths) {
    blocks.push_back({at, length * row});
    at += length * row * dtype_size(whole.dtype());
  }
  return blocks;
}

void Arguments::refuse_overlap() const {
  site_.refuse("the outputs overlap with each other; pass arrays of their own");
}

// Outputs that are strided have blocks of scratch memory, which never overlap: here they themselves are compared.
void Arguments::require_outputs_apart() const {
  std::vector<const ArrayView*> outputs;
  for (const ArrayView& view : issued_->arrays)
    if (view.access() != Access::kRead) outputs.push_back(&view);
  for (size_t index = 0; index < outputs.size(); ++index) {
    if (!outputs[index]->has_scratch()) continue;
    const Strided place = outputs[index]->place();
    for (size_t other = 0; other < outputs.size(); ++other)
      if (other != index && overlap(place, outputs[other]->place())) refuse_overlap();
  }
}

void Arguments::require_disjoint(const std::vector<Block>& inputs, const std::vector<Block>& outputs,
                                 bool may_share_own) const {
  require_outputs_apart();
  const size_t itemsize = dtype_size(dtype());
  const auto end_of = [&](const Block& block) { return begin_of(block) + block.count * itemsize; };
  std::vector<const Block*> sorted;
  for (const Block& block : outputs)
    if (block.count != 0) sorted.push_back(&block);
  std::ranges::sort(sorted, {}, [](const Block* block) { return begin_of(*block); });
  for (size_t index = 1; index < sorted.size(); ++index)
    if (begin_of(*sorted[index]) < end_of(*sorted[index - 1])) refuse_overlap();
  const auto rank = static_cast<size_t>(site_.rank());
  for (size_t index = 0; index < inputs.size(); ++index) {
    const Block& input = inputs[index];
    if (input.count == 0) continue;
    // The first output that ends behind the begin of the input; then only that one and the next may overlap with it.
    auto next =
        std::ranges::upper_bound(sorted, begin_of(input), {}, [&](const Block* block) { return end_of(*block); });
    for (; next != sorted.end() && begin_of(**next) < end_of(input); ++next) {
      const bool own =
          may_share_own && (inputs.size() == 1 || index == rank) && (outputs.size() == 1 || *next == &outputs[rank]);
      if (own && begin_of(**next) == begin_of(input) && (*next)->count == input.count) continue;
      site_.refuse(std::string("an output overlaps with an input; pass separate arrays") +
                   (may_share_own ? " (only the block of this rank for itself may be both)" : ""));
    }
  }
}

InputIovecs::InputIovecs(nb::handle buffers, nb::handle offsets, size_t bytes) : bytes_(bytes) {
  const size_t count = nb::len(buffers);
  if (nb::len(offsets) != count) throw nb::value_error("expected one offset for each buffer");
  views_.reserve(count);
  iovecs_.reserve(count);
  try {
    for (size_t index = 0; index < count; ++index) add(buffers[index], nb::cast<size_t>(offsets[index]));
  } catch (...) {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    throw;
  }
}

InputIovecs::~InputIovecs() {
  for (Py_buffer& view : views_) PyBuffer_Release(&view);
}

void InputIovecs::add(nb::handle buffer, size_t offset) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  views_.push_back(view);
  const auto size = static_cast<size_t>(view.len);
  const size_t end = iovecs_.empty() ? 0 : iovecs_.back().offset + iovecs_.back().bytes;
  if (offset < end || offset > bytes_ || size > bytes_ - offset)
    throw nb::value_error("expected iovecs in order that do not overlap and do not go beyond the array");
  if (size != 0) iovecs_.push_back({offset, size, static_cast<const std::byte*>(view.buf)});
}

std::unique_ptr<std::byte[]> InputIovecs::pack() const {
  std::unique_ptr<std::byte[]> whole(new std::byte[bytes_]());
  copy_iovecs(whole.get(), iovecs_, 0, bytes_, copy_cached);
  return whole;
}

}  // namespace procgroup
