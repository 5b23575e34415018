#include "store/connection.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace procgroup::store {
namespace {

constexpr size_t kReadBytes = 64 * 1024;
// Larger values are sent without a copy; smaller values are cheaper to copy behind their header.
constexpr size_t kCopyBytes = 16 * 1024;

std::string header(uint32_t request, Status status, size_t length) {
  const Header fields{static_cast<uint32_t>(length), static_cast<uint8_t>(status), {}, request};
  return {reinterpret_cast<const char*>(&fields), sizeof fields};
}

}  // namespace

ServerConnection::Receipt ServerConnection::receive() {
  static thread_local char scratch[kReadBytes];
  const ssize_t got = recv(socket.get(), scratch, sizeof scratch, MSG_DONTWAIT);
  if (got > 0) {
    input_.append(scratch, static_cast<size_t>(got));
    return Receipt::kSome;
  }
  const bool later = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return later ? Receipt::kNothing : Receipt::kClosed;
}

void ServerConnection::use(size_t bytes) {
  used_ += bytes;
  if (used_ < input_.size()) {
    // Bounds the buffer of a client that always sends the next frame before this one is used.
    if (used_ > 2 * kReadBytes && used_ > input_.size() / 2) input_.erase(0, std::exchange(used_, 0));
    return;
  }
  // Keep a small buffer for the next request, and free a large one.
  if (input_.capacity() > 2 * kReadBytes) input_ = std::string();
  input_.clear();
  used_ = 0;
}

bool ServerConnection::send(std::string_view bytes) {
  if (output_.empty()) {
    const ssize_t sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
    if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
    if (bytes.empty()) return true;
  }
  queue({std::string(bytes), nullptr});
  return true;
}

void ServerConnection::queue(Segment segment) {
  unsent_ += segment.bytes().size();
  output_.push_back(std::move(segment));
}

bool ServerConnection::send(uint32_t request, const StoreAnswer& answer) {
  size_t length = answer.text.size();
  for (const Value& value : answer.values) length += value->size() + (answer.fields ? 4 : 0);
  std::string bytes = header(request, answer.status, length);
  bytes.append(answer.text);
  bool ok = true;
  for (const Value& value : answer.values) {
    if (answer.fields) put_length(bytes, value->size());
    ok = ok && add(bytes, value);
  }
  if (!bytes.empty()) ok = ok && send(bytes);
  return ok && flush();
}

bool ServerConnection::send(const TorchReply& reply) {
  std::string bytes = reply.bytes;
  bool ok = true;
  for (const Value& value : reply.values) {
    put(bytes, value->size());
    ok = ok && add(bytes, value);
  }
  if (!bytes.empty()) ok = ok && send(bytes);
  return ok && flush();
}

// Append a small value to `bytes`; for a large one, send `bytes` and queue the value behind them without a copy.
bool ServerConnection::add(std::string& bytes, const Value& value) {
  if (value->size() <= kCopyBytes) {
    bytes.append(*value);
    return true;
  }
  const bool ok = send(bytes);
  bytes.clear();
  queue({{}, value});
  return ok;
}

bool ServerConnection::flush() {
  while (!output_.empty()) {
    const std::string_view left = output_.front().bytes().substr(sent_);
    const ssize_t sent = ::send(socket.get(), left.data(), left.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += static_cast<size_t>(sent);
    unsent_ -= static_cast<size_t>(sent);
    if (sent_ < output_.front().bytes().size()) continue;
    output_.pop_front();
    sent_ = 0;
  }
  return true;
}

}  // namespace procgroup::store
