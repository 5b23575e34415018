#include "store/torch_protocol.hpp"

#include <array>

namespace procgroup::store {
namespace {

// The arguments of each operation, in the order of TorchOp: k a key, v a value, n a number of 8 bytes, w one of 4;
// '*': a count, and so many times what follows.
constexpr std::array<std::string_view, 19> kKinds{
    "w", "kv", "kvv", "k", "kn", "*k", "*k", "", "k", "kv", "*k", "*kv", "", "w", "kv", "k", "k", "", "kn",
};
static_assert(kKinds.size() == size_t{static_cast<uint8_t>(TorchOp::kBarrier)} + 1);

constexpr size_t kCountBytes = 8;

uint64_t number_at(std::string_view input, size_t position) {
  uint64_t number;
  std::memcpy(&number, input.data() + position, sizeof number);
  return number;
}

void check_limit(const char* what, uint64_t size, uint64_t limit) {
  if (size <= limit) return;
  throw ProtocolError{std::string(what) + " of " + std::to_string(size) + " bytes, more than the limit of " +
                      std::to_string(limit)};
}

}  // namespace

std::optional<TorchRequest> TorchParser::parse(std::string_view input) {
  if (position_ == 0 && !start(input)) return {};
  while (rounds_ > 0) {
    if (!take_argument(input, kinds_[kind_])) return {};
    if (++kind_ < kinds_.size()) continue;
    kind_ = 0;
    --rounds_;
  }
  TorchRequest request{static_cast<TorchOp>(input.front()), {}, std::exchange(position_, 0)};
  request.arguments.reserve(arguments_.size());
  for (const auto& [position, size] : std::exchange(arguments_, {})) {
    request.arguments.push_back(input.substr(position, size));
  }
  return request;
}

// Reads the operation, and the count of what is repeated; returns whether they are there.
bool TorchParser::start(std::string_view input) {
  if (input.empty()) return false;
  const auto op = static_cast<uint8_t>(input.front());
  if (op >= kKinds.size() || op == static_cast<uint8_t>(TorchOp::kValidate)) {
    throw ProtocolError{"an unknown operation " + std::to_string(op) + " of PyTorch's TCPStore"};
  }
  kinds_ = kKinds[op];
  rounds_ = kinds_.empty() ? 0 : 1;
  size_t position = 1;
  if (kinds_.starts_with('*')) {
    if (input.size() < position + kCountBytes) return false;
    rounds_ = number_at(input, position);
    if (rounds_ > kMaxKeysPerRequest) throw ProtocolError{"a request with too many keys"};
    kinds_.remove_prefix(1);
    position += kCountBytes;
  }
  position_ = position;
  return true;
}

bool TorchParser::take_argument(std::string_view input, char kind) {
  const bool sized = kind == 'k' || kind == 'v';
  const size_t left = input.size() - position_;
  size_t begin = position_;
  uint64_t size = kind == 'n' ? sizeof(int64_t) : sizeof(uint32_t);
  if (sized) {
    if (left < kCountBytes) return false;
    size = number_at(input, position_);
    begin += kCountBytes;
    check_limit(kind == 'k' ? "a key" : "a value", size, kind == 'k' ? kMaxKeyBytes : kTorchMaxValueBytes);
    check_limit("a request", begin + size, kTorchMaxRequestBytes);
  }
  if (input.size() < begin + size) return false;
  arguments_.emplace_back(begin, size);
  position_ = begin + size;
  return true;
}

}  // namespace procgroup::store
