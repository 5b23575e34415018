// The stores of procgroup._native: a method for each request (see store/requests.hpp), whatever answers the requests.
//
// A method checks its arguments, encodes them as a request's body, has the request run, and decodes the reply. Failures
// become exceptions of procgroup.errors.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "store/requests.hpp"

namespace procgroup::store {

class StoreRequests {
 public:
  virtual ~StoreRequests() = default;

  // Run one request, whose body is `head` followed by `tail`, and return its reply; kCancelled when `seconds` pass
  // first. Called with the interpreter's lock held.
  virtual Reply request(Op op, std::string_view head, std::string_view tail, double seconds) = 0;
};

// Raise the exception of this name in procgroup.errors, made from keyword arguments or from a text.
[[noreturn]] void raise_error(const char* name, const nanobind::dict& arguments);
[[noreturn]] void raise_error(const char* name, const std::string& text);

inline nanobind::bytes as_bytes(std::string_view body) { return nanobind::bytes(body.data(), body.size()); }
inline std::string_view bytes_of(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// The number in a reply's body.
template <class Number>
Number number_in(std::string_view body) {
  try {
    return BodyReader(body).take<Number>();
  } catch (const ProtocolError& error) {
    raise_error("DistStoreError", "the store's server sent a malformed reply: " + error.reason);
  }
}

// Add the methods of Scope::kClient to a class derived from StoreRequests.
void bind_client_requests(nanobind::handle owner);
// StoreServer and StoreClient, over TCP.
void bind_tcp_store(nanobind::module_& module);
// InProcessStore, for the threads of a process; ForwardedRequests and StoreTable, for requests that Python code runs.
void bind_local_stores(nanobind::module_& module);

}  // namespace procgroup::store
