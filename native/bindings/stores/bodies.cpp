#include "bindings/stores/bodies.hpp"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace procgroup::store {
namespace {

// The UTF-8 bytes of a str, which live as long as it does.
std::string_view text_of(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) throw nb::python_error();
  return {bytes, static_cast<size_t>(size)};
}

std::string class_name(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

size_t checked_count(nb::sequence keys) {
  if (PyUnicode_Check(keys.ptr()) || PyBytes_Check(keys.ptr())) {
    throw nb::type_error("expected keys to be a sequence of str, got one str");
  }
  const size_t count = nb::len(keys);
  if (count > kMaxKeysPerRequest) raise_limit("a list of keys", count, kMaxKeysPerRequest);
  return count;
}

// Call `use` with each field of a reply's body.
template <class Use>
void for_each_field(const std::string& body, Use use) {
  try {
    for (BodyReader reader(body); !reader.at_end();) use(reader.take_field());
  } catch (const ProtocolError& error) {
    raise_malformed(error);
  }
}

}  // namespace

void raise_error(const char* name, const nb::dict& arguments) {
  const nb::object type = nb::module_::import_("procgroup.errors").attr(name);
  const nb::object made = type(**arguments);
  PyErr_SetObject(type.ptr(), made.ptr());
  throw nb::python_error();
}

void raise_error(const char* name, const std::string& text) {
  const nb::object type = nb::module_::import_("procgroup.errors").attr(name);
  // What a server sent need not be UTF-8.
  const auto size = static_cast<Py_ssize_t>(text.size());
  const nb::object words = nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "replace"));
  PyErr_SetObject(type.ptr(), words.ptr());
  throw nb::python_error();
}

void raise_limit(const char* what, size_t size, size_t limit) {
  nb::dict data;
  data["what"] = what;
  data["size"] = size;
  data["limit"] = limit;
  raise_error("StoreLimitError", data);
}

std::string_view key_of(nb::handle key) {
  if (!PyUnicode_Check(key.ptr())) {
    throw nb::type_error(("expected key to be str, got " + class_name(key)).c_str());
  }
  const std::string_view bytes = text_of(key);
  if (bytes.size() > kMaxKeyBytes) raise_limit("a key", bytes.size(), kMaxKeyBytes);
  return bytes;
}

std::string_view value_of(nb::handle value) {
  std::string_view bytes;
  if (PyBytes_Check(value.ptr())) {
    bytes = {PyBytes_AsString(value.ptr()), static_cast<size_t>(PyBytes_Size(value.ptr()))};
  } else if (PyUnicode_Check(value.ptr())) {
    bytes = text_of(value);
  } else {
    throw nb::type_error(("expected value to be str or bytes, got " + class_name(value)).c_str());
  }
  if (bytes.size() > kMaxValueBytes) raise_limit("a value", bytes.size(), kMaxValueBytes);
  return bytes;
}

std::string body_of_key(nb::handle key) {
  std::string body;
  put_field(body, key_of(key));
  return body;
}

std::string body_of_keys(nb::sequence keys) {
  std::string body;
  const size_t count = checked_count(keys);
  for (size_t i = 0; i < count; ++i) put_field(body, key_of(nb::object(keys[i])));
  return body;
}

std::string body_of_pairs(nb::sequence keys, nb::sequence values) {
  std::string body;
  const size_t count = checked_count(keys);
  for (size_t i = 0; i < count; ++i) {
    put_field(body, key_of(nb::object(keys[i])));
    put_field(body, value_of(nb::object(values[i])));
  }
  return body;
}

std::string body_before_value(nb::handle key, std::string_view value) {
  std::string body = body_of_key(key);
  put_length(body, value.size());
  return body;
}

nb::bytes as_bytes(std::string_view body) { return nb::bytes(body.data(), body.size()); }

nb::typed<nb::list, nb::bytes> values_in(const std::string& body) {
  nb::typed<nb::list, nb::bytes> values;
  for_each_field(body, [&](std::string_view value) { values.append(as_bytes(value)); });
  return values;
}

nb::typed<nb::list, nb::str> keys_in(const std::string& body) {
  nb::typed<nb::list, nb::str> keys;
  // Another client's key need not be UTF-8.
  for_each_field(body, [&](std::string_view key) {
    keys.append(nb::steal(PyUnicode_DecodeUTF8(key.data(), static_cast<Py_ssize_t>(key.size()), "replace")));
  });
  return keys;
}

void raise_malformed(const ProtocolError& error) {
  raise_error("DistStoreError", "the store's server sent a malformed reply: " + error.reason);
}

}  // namespace procgroup::store
