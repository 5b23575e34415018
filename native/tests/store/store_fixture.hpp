// A listening socket, and requests to a store, for the native tests. A store is a Client or an InProcessStore.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "store/client.hpp"
#include "store/server.hpp"
#include "tests/check.hpp"

namespace procgroup::testing {

using namespace procgroup::store;  // NOLINT

inline const Check kNothing = [] {};

inline int listen_on_loopback() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(listener, 1024) == 0);
  return listener;
}

inline Deadline soon() { return Deadline::after(20); }

inline std::string key_only(std::string_view key) {
  std::string body;
  put_field(body, key);
  return body;
}

inline std::string several_keys(const std::vector<std::string>& keys) {
  std::string body;
  put_length(body, keys.size());
  for (const std::string& key : keys) put_field(body, key);
  return body;
}

template <class AnyStore>
uint64_t add(AnyStore& store, std::string_view key, uint64_t amount) {
  std::string body = key_only(key);
  put(body, amount);
  return BodyReader(store.request(Op::kAdd, body, {}, soon(), kNothing).body).take<uint64_t>();
}

template <class AnyStore>
void barrier(AnyStore& store, std::string_view key, uint64_t size) {
  std::string body = key_only(key);
  put(body, size);
  CHECK(store.request(Op::kBarrier, body, {}, soon(), kNothing).status == Status::kOk);
}

template <class AnyStore>
void set(AnyStore& store, std::string_view key, std::string_view value) {
  std::string head = key_only(key);
  put_length(head, value.size());
  CHECK(store.request(Op::kSet, head, value, soon(), kNothing).status == Status::kOk);
}

template <class Expected, class Function>
bool throws(Function&& function) {
  try {
    function();
  } catch (const Expected&) {
    return true;
  }
  return false;
}

}  // namespace procgroup::testing
