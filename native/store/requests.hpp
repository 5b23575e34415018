// The table of the requests of a key-value store: names, parameters and results.
//
// The table of keys (table.hpp) decodes the body of a request by its row. The bindings make a method of each row, which
// encodes its arguments and decodes its result. The parameters follow each other in the body, in the row's order.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "store/protocol.hpp"

namespace procgroup::store {

// On the wire, and in the log of a store on a file.
enum class Op : uint8_t {
  kSet = 1,
  kGet,
  kWait,
  kAdd,
  kCheck,
  kCompareSet,
  kDelete,
  kNumKeys,
  kListKeys,
  kAppend,
  kMultiGet,
  kMultiSet,
  kQueuePush,
  kQueuePop,
  kQueueLength,
  kBarrier,
  kWorkers,
  kCancel,
  kGetUnless,
  kSetOnDisconnect,
  kWithdrawOnDisconnect,
};

enum class Kind : uint8_t {
  kNone,
  kKey,      // a field of at most kMaxKeyBytes
  kKeys,     // u32 how many, keys
  kValue,    // a field of at most kMaxValueBytes
  kValues,   // u32 how many, values
  kAmount,   // i64
  kCount,    // u64
  kFlag,     // u8
  kRequest,  // u32, the number of an earlier request of the connection
};

enum class Result : uint8_t {
  kNothing,
  kValue,          // its bytes
  kValues,         // fields
  kValuesOrValue,  // fields; with Status::kUnless the bytes of one value
  kKeys,           // fields
  kAmount,         // i64
  kCount,          // u64
  kFlag,           // u8
};

// Where the request is a method: of every store, of the clients of a server, or nowhere.
enum class Scope : uint8_t { kEveryStore, kClient, kProtocol };
// For what the reply waits: nothing, all of the request's keys, or other requests of its kind.
enum class Waits : uint8_t { kNo, kForKeys, kForOthers };

struct Parameter {
  const char* name = "";
  Kind kind = Kind::kNone;
};

struct StoreRequest {
  Op op;
  const char* name;
  std::array<Parameter, 3> parameters;
  Result result = Result::kNothing;
  Waits waits = Waits::kNo;
  Scope scope = Scope::kEveryStore;

  constexpr size_t count() const {
    size_t count = 0;
    while (count < parameters.size() && parameters[count].kind != Kind::kNone) ++count;
    return count;
  }
};

inline constexpr Parameter kKey{"key", Kind::kKey}, kKeys{"keys", Kind::kKeys}, kValue{"value", Kind::kValue};

// In the order of Op.
inline constexpr std::array kRequests{
    StoreRequest{Op::kSet, "set", {kKey, kValue}},
    StoreRequest{Op::kGet, "get", {kKey}, Result::kValue, Waits::kForKeys},
    StoreRequest{Op::kWait, "wait", {kKeys}, Result::kNothing, Waits::kForKeys},
    StoreRequest{Op::kAdd, "add", {kKey, {"amount", Kind::kAmount}}, Result::kAmount},
    StoreRequest{Op::kCheck, "check", {kKeys}, Result::kFlag},
    // Missing, with an empty `expected`: the value is set. Returns the value after that, or `expected`.
    StoreRequest{
        Op::kCompareSet, "compare_set", {kKey, {"expected", Kind::kValue}, {"desired", Kind::kValue}}, Result::kValue},
    StoreRequest{Op::kDelete, "delete_key", {kKey}, Result::kFlag},
    StoreRequest{Op::kNumKeys, "num_keys", {}, Result::kCount},
    StoreRequest{Op::kListKeys, "list_keys", {{{"prefix", Kind::kKey}}}, Result::kKeys},
    StoreRequest{Op::kAppend, "append", {kKey, kValue}},
    StoreRequest{Op::kMultiGet, "multi_get", {kKeys}, Result::kValues, Waits::kForKeys},
    StoreRequest{Op::kMultiSet, "multi_set", {kKeys, {"values", Kind::kValues}}},
    StoreRequest{Op::kQueuePush, "queue_push", {kKey, kValue}},
    StoreRequest{Op::kQueuePop, "queue_pop", {kKey, {"block", Kind::kFlag}}, Result::kValue, Waits::kForKeys},
    StoreRequest{Op::kQueueLength, "queue_len", {kKey}, Result::kCount},
    StoreRequest{Op::kBarrier, "barrier", {kKey, {"world_size", Kind::kCount}}, Result::kNothing, Waits::kForOthers},
    // Returns how many workers have joined; the body of its kCancelled is the same.
    StoreRequest{Op::kWorkers,
                 "wait_for_workers",
                 {{{"count", Kind::kCount}}},
                 Result::kCount,
                 Waits::kForOthers,
                 Scope::kProtocol},
    // Has no reply of its own.
    StoreRequest{
        Op::kCancel, "cancel", {{{"request", Kind::kRequest}}}, Result::kNothing, Waits::kNo, Scope::kProtocol},
    // The key `unless` ends the wait, too, with its value.
    StoreRequest{
        Op::kGetUnless, "get_unless", {kKeys, {"unless", Kind::kKey}}, Result::kValuesOrValue, Waits::kForKeys},
    // Sets the key when the connection ends, unless it has a value then.
    StoreRequest{
        Op::kSetOnDisconnect, "set_on_disconnect", {kKey, kValue}, Result::kNothing, Waits::kNo, Scope::kClient},
    StoreRequest{
        Op::kWithdrawOnDisconnect, "withdraw_on_disconnect", {kKey}, Result::kNothing, Waits::kNo, Scope::kClient},
};

constexpr bool is_in_order() {
  for (size_t i = 0; i < kRequests.size(); ++i) {
    if (static_cast<size_t>(kRequests[i].op) != i + 1) return false;
  }
  return true;
}
static_assert(is_in_order());

constexpr const StoreRequest& request_of(Op op) { return kRequests[static_cast<size_t>(op) - 1]; }

struct Reply {
  Status status = Status::kOk;
  std::string body;
};

// Called at least every 0.1 s while a request blocks, and soon after a signal; ends the request by throwing.
using Check = std::function<void()>;

template <Kind kind>
auto take(BodyReader& body) {
  if constexpr (kind == Kind::kKey) return std::string(body.take_key());
  if constexpr (kind == Kind::kKeys) return body.take_several([&] { return std::string(body.take_key()); });
  if constexpr (kind == Kind::kValue) return body.take_value();
  if constexpr (kind == Kind::kValues) return body.take_several([&] { return body.take_value(); });
  if constexpr (kind == Kind::kAmount) return body.take<int64_t>();
  if constexpr (kind == Kind::kCount) return body.take<uint64_t>();
  if constexpr (kind == Kind::kFlag) return body.take<uint8_t>() != 0;
  if constexpr (kind == Kind::kRequest) return body.take<uint32_t>();
}

// The arguments of a request, from its body. Throws ProtocolError for a body that does not fit the request's row.
template <Op op>
auto arguments_in(std::string_view bytes) {
  return [bytes]<size_t... I>(std::index_sequence<I...>) {
    BodyReader body(bytes);
    // Braces: from left to right.
    std::tuple arguments{take<request_of(op).parameters[I].kind>(body)...};
    body.finish();
    return arguments;
  }(std::make_index_sequence<request_of(op).count()>());
}

}  // namespace procgroup::store
