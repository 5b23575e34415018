// One client's connection on the server's side: its input, its queued output and the state of its handshake.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "base/file_descriptor.hpp"
#include "store/protocol.hpp"
#include "store/table.hpp"
#include "store/torch_store.hpp"

namespace procgroup::store {

class ServerConnection {
 public:
  enum class State { kHello, kProof, kOpen, kTorch };
  enum class Receipt { kSome, kNothing, kClosed };

  ServerConnection(uint64_t number, FileDescriptor accepted, std::string from)
      : id(number), socket(std::move(accepted)), peer(std::move(from)) {}

  const uint64_t id;
  FileDescriptor socket;
  const std::string peer;  // "address:port", for log lines
  State state = State::kHello;
  TorchParser torch_parser;  // in state kTorch
  Hello hello{};             // once received
  Welcome welcome{};         // the reply to it
  bool closing = false;      // to be closed at the end of this iteration of the server's loop
  bool polls_writable = false;
  size_t counted_bytes = 0;  // queued_bytes(), in state kTorch, at the last count

  // Whether the handshake is complete.
  bool is_open() const { return state == State::kOpen || state == State::kTorch; }
  // Read once from the socket.
  Receipt receive();
  // The received bytes that are not used yet.
  std::string_view input() const { return std::string_view(input_).substr(used_); }
  void use(size_t bytes);

  // Each sends without blocking and queues the rest; returns false when the connection is broken.
  bool send(std::string_view bytes);
  bool send(uint32_t request, const StoreAnswer& answer);
  bool send(const TorchReply& reply);
  bool flush();
  bool has_output() const { return !output_.empty(); }
  // Memory of the input and the output, including values that the output shares with the table.
  size_t queued_bytes() const { return input_.capacity() + unsent_ + torch_parser.memory_bytes(); }

 private:
  struct Segment {
    std::string own;
    Value shared;  // instead of `own`
    std::string_view bytes() const { return shared ? std::string_view(*shared) : std::string_view(own); }
  };

  void queue(Segment segment);
  bool add(std::string& bytes, const Value& value);

  std::string input_;
  size_t used_ = 0;
  std::deque<Segment> output_;
  size_t sent_ = 0;    // of the first segment
  size_t unsent_ = 0;  // of all segments
};

}  // namespace procgroup::store
