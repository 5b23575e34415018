// Arguments of a store's methods as bodies of requests, and bodies of replies as Python objects (see
// store/protocol.hpp).
//
// Raises TypeError for an argument of another type, and exceptions of procgroup.errors.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "store/protocol.hpp"

namespace procgroup::store {

using Keys = nanobind::typed<nanobind::sequence, nanobind::str>;
using Values = nanobind::typed<nanobind::sequence, nanobind::object>;

// Raise the exception of this name in procgroup.errors, made from keyword arguments or from a text.
[[noreturn]] void raise_error(const char* name, const nanobind::dict& arguments);
[[noreturn]] void raise_error(const char* name, const std::string& text);
// Raise a StoreLimitError for `what`.
[[noreturn]] void raise_limit(const char* what, size_t size, size_t limit);

// The UTF-8 bytes of a key, which live as long as the key. Raises StoreLimitError for one that is too long.
std::string_view key_of(nanobind::handle key);
// The bytes of a value, which is str or bytes, and which they live as long as. Raises StoreLimitError.
std::string_view value_of(nanobind::handle value);

// A body of one key.
std::string body_of_key(nanobind::handle key);
// A body of several keys. Raises StoreLimitError for too many.
std::string body_of_keys(nanobind::sequence keys);
// A body of keys, each followed by its value.
std::string body_of_pairs(nanobind::sequence keys, nanobind::sequence values);
// A body of a key and the length of a value, which follows as the request's tail.
std::string body_before_value(nanobind::handle key, std::string_view value);

nanobind::bytes as_bytes(std::string_view body);
nanobind::typed<nanobind::list, nanobind::bytes> values_in(const std::string& body);
nanobind::typed<nanobind::list, nanobind::str> keys_in(const std::string& body);

[[noreturn]] void raise_malformed(const ProtocolError& error);

template <class Number>
Number number_in(const std::string& body) {
  try {
    return BodyReader(body).take<Number>();
  } catch (const ProtocolError& error) {
    raise_malformed(error);
  }
}

}  // namespace procgroup::store
