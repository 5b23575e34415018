#include "input_iovecs.hpp"

namespace nb = nanobind;

namespace procgroup {

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
