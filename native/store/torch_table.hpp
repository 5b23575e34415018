// The keys and queues of PyTorch's TCPStore clients, and the connections that wait for them. No sockets.
//
// Its replies are those of torch's own server, with these exceptions: a sum that does not fit in 64 bits is an error; a
// queue that is not empty counts as present in a wait for several keys; compare_set ends waits only if it sets the key.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/table.hpp"
#include "store/torch_protocol.hpp"

namespace procgroup::store {

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
