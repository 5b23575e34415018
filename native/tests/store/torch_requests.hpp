// Requests of PyTorch's TCPStore clients as bytes, for the native tests.
#pragma once

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "store/torch_store.hpp"

namespace procgroup::testing {

using namespace procgroup::store;  // NOLINT

using Random = std::mt19937;

inline std::string sized(std::string_view bytes) {
  std::string text;
  put(text, bytes.size());
  return text.append(bytes);
}

inline std::string number(int64_t value) {
  std::string text;
  put(text, static_cast<uint64_t>(value));
  return text;
}

inline std::string request(TorchOp op, const std::string& arguments = {}) {
  return std::string(1, static_cast<char>(op)) + arguments;
}

inline std::string request_with_keys(TorchOp op, const std::vector<std::string>& keys) {
  std::string arguments = number(static_cast<int64_t>(keys.size()));
  for (const std::string& key : keys) arguments += sized(key);
  return request(op, arguments);
}

// A request, and the arguments that its parser finds in it.
struct Example {
  std::string bytes;
  std::vector<std::string> arguments;
};

inline const std::vector<Example>& examples() {
  static const std::string key = sized("/key");
  static const std::vector<Example> all{
      {request(TorchOp::kSet, key + sized("value")), {"/key", "value"}},
      {request(TorchOp::kCompareSet, key + sized("") + sized("new")), {"/key", "", "new"}},
      {request(TorchOp::kGet, key), {"/key"}},
      {request(TorchOp::kAdd, key + number(-3)), {"/key", number(-3)}},
      {request_with_keys(TorchOp::kCheck, {}), {}},
      {request_with_keys(TorchOp::kWait, {"a", "", "c"}), {"a", "", "c"}},
      {request(TorchOp::kNumKeys), {}},
      {request(TorchOp::kDelete, key), {"/key"}},
      {request(TorchOp::kAppend, key + sized(std::string(3000, 'x'))), {"/key", std::string(3000, 'x')}},
      {request_with_keys(TorchOp::kMultiGet, {"a", "b"}), {"a", "b"}},
      {request(TorchOp::kMultiSet, number(2) + key + sized("1") + sized("b") + sized("2")), {"/key", "1", "b", "2"}},
      {request(TorchOp::kCancelWait), {}},
      {request(TorchOp::kPing, "pid."), {"pid."}},
      {request(TorchOp::kQueuePush, key + sized("value")), {"/key", "value"}},
      {request(TorchOp::kQueuePop, key), {"/key"}},
      {request(TorchOp::kQueueLength, key), {"/key"}},
      {request(TorchOp::kListKeys), {}},
      {request(TorchOp::kBarrier, key + number(4)), {"/key", number(4)}},
  };
  return all;
}

// Five requests of which some bytes are wrong and the end is missing.
inline std::string damaged(Random& random) {
  std::string stream;
  for (int i = 0; i < 5; ++i) stream += examples()[random() % examples().size()].bytes;
  for (int i = 0; i < 3; ++i) stream[random() % stream.size()] = static_cast<char>(random());
  return stream.substr(0, random() % stream.size());
}

}  // namespace procgroup::testing
