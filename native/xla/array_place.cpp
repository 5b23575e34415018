#include "xla/array_place.hpp"

#include <cstring>
#include <utility>

#include "group/group_operation.hpp"
#include "ops/preparation.hpp"

namespace procgroup {

std::shared_ptr<std::byte[]> HostPlace::allocate(size_t bytes) {
  return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
}

void HostPlace::copy(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }

void HostPlace::clear(void* at, size_t bytes) const { std::memset(at, 0, bytes); }

void HostPlace::run(Request request) {
  prepare(request);
  group_.run(request, seconds_, language_);
}

// Where the receive fails, the message that is sent stays on its way, as that of another asynchronous send: what is not
// sent at once has memory of its own, because XLA's may be gone by then.
void HostPlace::exchange(MessageRequest sent, MessageRequest received) {
  std::shared_ptr<GroupOperation> sending;
  if (!group_.start_at_once(sent)) {
    const size_t bytes = sent.count * dtype_size(sent.dtype);
    const std::shared_ptr<std::byte[]> copied = allocate(bytes);
    copy(copied.get(), sent.data, bytes);
    sent.data = copied.get();
    sent.after = [copied] {};  // the operation owns it
    sending = group_.start_message(sent, seconds_);
  }
  group_.run_message(received, seconds_, language_);
  if (!sending) return;
  bool interrupted = false;
  const std::optional<Failure> failure = group_.await(*sending, Deadline::never(), language_, interrupted).failure;
  if (interrupted) throw OperationFailed{{.kind = Failure::Kind::kInterrupted}, sending->call()};
  if (failure) throw group_.reported(*failure, sending->call());
}

Bundle::Bundle(ArrayPlace& place, const XlaArrays& arrays, size_t rows)
    : place_(place), dtype_(arrays.front().dtype), rows_(rows) {
  for (const XlaArray& array : arrays) {
    parts_.push_back({array.data, array.count / rows});
    width_ += parts_.back().count;
  }
  if ((parts_.size() > 1 || place.needs_scratch()) && bytes() != 0) scratch_ = place.allocate(bytes());
}

std::vector<Block> Bundle::rows() const {
  std::vector<Block> rows(rows_);
  for (size_t row = 0; row < rows_; ++row)
    rows[row] = {static_cast<std::byte*>(data()) + row * width_ * dtype_size(dtype_), width_};
  return rows;
}

void Bundle::pack() const {
  for_each_part([this](std::byte* packed, std::byte* part, size_t size) { place_.copy(packed, part, size); });
}

void Bundle::unpack() const {
  for_each_part([this](std::byte* packed, std::byte* part, size_t size) { place_.copy(part, packed, size); });
}

template <class Copy>
void Bundle::for_each_part(Copy copy) const {
  if (!scratch_) return;
  std::byte* packed = scratch_.get();
  for (size_t row = 0; row < rows_; ++row)
    for (const Block& part : parts_) {
      const size_t size = part.count * dtype_size(dtype_);
      if (size != 0) copy(packed, static_cast<std::byte*>(part.data) + row * size, size);
      packed += size;
    }
}

}  // namespace procgroup
