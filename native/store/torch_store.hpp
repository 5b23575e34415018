// PyTorch's TCPStore: the wire protocol of torch 2.13, and the keys, queues and waits of its clients. No sockets.
//
// Vocabulary. A connection begins with a *validation*: the operation kValidate and a magic number; it has no reply.
// *Requests* follow: one byte for the operation, then its *arguments*. A request carries no total length, so its end is
// known only when its last argument has arrived. Most requests have one *reply*; those that only write have none. A
// wait or a barrier has its reply when it ends. Deadlines belong to the client: when one passes it sends kCancelWait,
// which always has a reply, also when the wait's own reply was sent before.
//
//   client                                  server
//     | -- kValidate, magic number ----------> |
//     | -- kPing, nonce ---------------------> |
//     | <-------------------------- the nonce -|
//     | -- kSet "/a" "1" --------------------> |   no reply
//     | -- kWait 2 keys "/a" "/b" -----------> |   "/b" is missing
//     | <---------------------- kStopWaiting - |   once another client has set it
//     | -- kMultiGet 2 keys "/a" "/b" -------> |
//     | <------------------ value, value ------|
//
//   request:  | u8 operation | arguments |
//   key, value, and a value in a reply:   | u64 length | bytes |
//   several keys:   | u64 count | the keys |
//
// All numbers are little-endian. The client puts "/" before its keys, except for "init/", which counts the clients.
//
// The protocol has no secret, no job name and no error reply: a request that has no valid reply closes its connection.
//
// The table's replies are those of torch's own server, with these exceptions: a sum that does not fit in 64 bits is an
// error; a queue that is not empty counts as present in a wait for several keys; compare_set ends waits only if it sets
// the key.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/table.hpp"

namespace procgroup::store {

// The validation: the operation kValidate and the magic number 0x3C85F7CE.
inline constexpr std::string_view kTorchValidation{"\x00\xCE\xF7\x85\x3C", 5};

// Clients are not authenticated, so the memory of all clients together is bounded, too. PyTorch's programs store
// addresses and small pickles.
inline constexpr size_t kTorchMaxValueBytes = size_t{16} << 20;
inline constexpr size_t kTorchMaxRequestBytes = size_t{64} << 20;
inline constexpr size_t kTorchMaxReplyBytes = size_t{64} << 20;
// All keys, values and waits.
inline constexpr size_t kTorchMaxKeptBytes = size_t{128} << 20;
// Unused input and unsent replies of all connections.
inline constexpr size_t kTorchMaxQueuedBytes = size_t{128} << 20;

enum class TorchOp : uint8_t {
  kValidate,
  kSet,          // key, value             ->
  kCompareSet,   // key, expected, desired -> the value
  kGet,          // key                    -> the value, or an empty one
  kAdd,          // key, i64               -> i64
  kCheck,        // keys                   -> TorchCheckReply
  kWait,         // keys                   -> kStopWaiting, in the end
  kNumKeys,      //                        -> i64
  kDelete,       // key                    -> i64 how many
  kAppend,       // key, value             ->
  kMultiGet,     // keys                   -> values
  kMultiSet,     // their count, keys and values in turn ->
  kCancelWait,   //                        -> kWaitCancelled
  kPing,         // u32 nonce              -> u32 nonce
  kQueuePush,    // key, value             ->
  kQueuePop,     // key                    -> i64 length before, and if that is not 0 the value
  kQueueLength,  // key                    -> i64
  kListKeys,     //                        -> i64 how many, keys
  kBarrier,      // key, i64 world size    -> kStopWaiting, in the end
};

enum class TorchCheckReply : char { kReady, kNotReady };
enum class TorchWaitReply : char { kStopWaiting, kWaitCancelled };

// A complete request. Its arguments are in the order above, without lengths and counts, and refer to the input.
struct TorchRequest {
  TorchOp op;
  std::vector<std::string_view> arguments;
  size_t length;  // of the whole request
};

// Splits a connection's input into requests. Each argument is examined once, however the input is split into reads.
class TorchParser {
 public:
  // Return the request at the beginning of `input`, or nothing when it is incomplete; the next call must then pass the
  // same bytes and more. Throws ProtocolError for an unknown operation and for sizes beyond the limits.
  std::optional<TorchRequest> parse(std::string_view input);
  // Memory of an incomplete request beside its input.
  size_t memory_bytes() const { return arguments_.capacity() * sizeof arguments_[0]; }

 private:
  bool start(std::string_view input);
  bool take_argument(std::string_view input, char kind);

  std::string_view kinds_;  // the kinds of an incomplete request's arguments; see torch_store.cpp
  uint64_t rounds_ = 0;     // how many times `kinds_` is still expected
  size_t kind_ = 0;         // index of the next kind in this round
  size_t position_ = 0;     // of the next argument; 0: no incomplete request
  std::vector<std::pair<size_t, size_t>> arguments_;  // position and size
};

struct TorchReply {
  std::string bytes;
  std::vector<Value> values;  // after the bytes, each behind its length
  size_t size() const {
    size_t total = bytes.size();
    for (const Value& value : values) total += sizeof(uint64_t) + value->size();
    return total;
  }
};

class TorchTable {
 public:
  using Deliver = std::function<void(uint64_t connection, TorchReply&&)>;

  // Every reply is passed to `deliver`, also the replies that end other connections' waits.
  explicit TorchTable(Deliver deliver) : deliver_(std::move(deliver)) {}

  // Run one request. Throws ProtocolError, and changes nothing, for an error to which the protocol has no reply.
  void run(uint64_t connection, const TorchRequest& request);
  // Drop the connection's wait, if any, without a reply.
  void forget(uint64_t connection);
  // Remove all keys, queues and waits.
  void clear();
  // Estimated memory of all keys, values, queues and waits.
  size_t kept_bytes() const { return kept_bytes_; }

 private:
  using Waiters = std::list<uint64_t>;  // the connections that wait for a key, in order of arrival
  // The keys that are still missing, each with the connection's position among the key's waiters.
  using Wait = std::unordered_map<std::string, Waiters::iterator>;
  using Arguments = std::vector<std::string_view>;

  void set(const std::string& key, Value value);
  void keep(const std::string& key, Value value);
  int64_t erase(const std::string& key);
  // Throws ProtocolError when this many more bytes would exceed kTorchMaxKeptBytes.
  void check_fits(size_t bytes) const;
  void compare_set(uint64_t connection, const Arguments& arguments);
  void add(uint64_t connection, const std::string& key, int64_t amount);
  void wait(uint64_t connection, const Arguments& keys);
  void append(const std::string& key, std::string_view tail);
  void multi_get(uint64_t connection, const Arguments& keys);
  void multi_set(const Arguments& arguments);
  void queue_push(const std::string& key, std::string_view value);
  void queue_pop(uint64_t connection, const std::string& key);
  void list_keys(uint64_t connection);
  void barrier(uint64_t connection, const std::string& key, int64_t world_size);

  Value find(const std::string& key) const;
  bool exists(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }
  int64_t sum_at(const std::string& key, int64_t amount) const;
  void check_may_wait(uint64_t connection) const;
  // Let the connection wait for these keys, even if they exist.
  void begin_wait(uint64_t connection, const std::vector<std::string>& missing);
  void wake_all(const std::string& key);
  void wake_one(const std::string& key);
  bool end_wait_for(uint64_t connection, const std::string& key);
  void reply(uint64_t connection, std::string bytes) { deliver_(connection, TorchReply{std::move(bytes), {}}); }
  void reply_number(uint64_t connection, int64_t number);

  Deliver deliver_;
  size_t kept_bytes_ = 0;
  std::unordered_map<std::string, Value> values_;
  std::unordered_map<std::string, std::deque<Value>> queues_;  // none is empty
  std::unordered_map<std::string, Waiters> waiters_;           // none is empty
  std::unordered_map<uint64_t, Wait> waits_;                   // by connection, which has one at most
};

}  // namespace procgroup::store
