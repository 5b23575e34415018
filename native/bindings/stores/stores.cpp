// The methods of stores, made from the table of requests, and the digest with which both sides prove a job's key.
#include "bindings/stores/stores.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <cstring>
#include <type_traits>
#include <variant>

#include "base/sha256.hpp"
#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace procgroup::store {
namespace {

using Keys = nb::typed<nb::sequence, nb::str>;
using Values = nb::typed<nb::sequence, nb::object>;
using BytesList = nb::typed<nb::list, nb::bytes>;
using StrList = nb::typed<nb::list, nb::str>;

// The Python types of parameters and results. Keys and values may be any object, so that the errors are ours.
template <Kind kind>
auto argument_type() {
  if constexpr (kind == Kind::kKey || kind == Kind::kValue) return std::type_identity<nb::handle>();
  if constexpr (kind == Kind::kKeys) return std::type_identity<Keys>();
  if constexpr (kind == Kind::kValues) return std::type_identity<Values>();
  if constexpr (kind == Kind::kAmount) return std::type_identity<int64_t>();
  if constexpr (kind == Kind::kCount) return std::type_identity<uint64_t>();
  if constexpr (kind == Kind::kFlag) return std::type_identity<bool>();
}
template <Kind kind>
using Argument = typename decltype(argument_type<kind>())::type;

template <Kind kind>
constexpr auto named(const char* name) {
  if constexpr (std::is_same_v<Argument<kind>, nb::handle>) {
    return nb::arg(name).none();
  } else {
    return nb::arg(name);
  }
}

[[noreturn]] void raise_limit(const char* what, size_t size, size_t limit) {
  nb::dict data;
  data["what"] = what;
  data["size"] = size;
  data["limit"] = limit;
  raise_error("StoreLimitError", data);
}

[[noreturn]] void raise_type(const char* expected, nb::handle given) {
  const auto name = nb::cast<std::string>(given.type().attr("__name__"));
  throw nb::type_error((std::string("expected ") + expected + ", got " + name).c_str());
}

// The UTF-8 bytes of a str, which live as long as it does.
std::string_view text_of(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) throw nb::python_error();
  return {bytes, static_cast<size_t>(size)};
}

std::string_view key_of(nb::handle key) {
  if (!PyUnicode_Check(key.ptr())) raise_type("key to be str", key);
  const std::string_view bytes = text_of(key);
  if (bytes.size() > kMaxKeyBytes) raise_limit("a key", bytes.size(), kMaxKeyBytes);
  return bytes;
}

// The bytes of a value, which is str or bytes, and which they live as long as.
std::string_view value_of(nb::handle value) {
  std::string_view bytes;
  if (PyBytes_Check(value.ptr())) {
    bytes = {PyBytes_AsString(value.ptr()), static_cast<size_t>(PyBytes_Size(value.ptr()))};
  } else if (PyUnicode_Check(value.ptr())) {
    bytes = text_of(value);
  } else {
    raise_type("value to be str or bytes", value);
  }
  if (bytes.size() > kMaxValueBytes) raise_limit("a value", bytes.size(), kMaxValueBytes);
  return bytes;
}

size_t checked_count(nb::sequence keys, bool are_keys) {
  if (PyUnicode_Check(keys.ptr()) || PyBytes_Check(keys.ptr())) {
    throw nb::type_error(are_keys ? "expected keys to be a sequence of str, got one str"
                                  : "expected values to be a sequence of str or bytes, got one");
  }
  const size_t count = nb::len(keys);
  if (count > kMaxKeysPerRequest)
    raise_limit(are_keys ? "a list of keys" : "a list of values", count, kMaxKeysPerRequest);
  return count;
}

// A request's body. A value that is the last parameter is not copied into it: it is the tail.
struct Body {
  std::string head;
  std::string_view tail;

  template <Kind kind>
  void put(const Argument<kind>& argument, bool is_last) {
    if constexpr (kind == Kind::kKey) {
      put_field(head, key_of(argument));
    } else if constexpr (kind == Kind::kValue) {
      const std::string_view bytes = value_of(argument);
      put_length(head, bytes.size());
      is_last ? void(tail = bytes) : void(head.append(bytes));
    } else if constexpr (kind == Kind::kKeys || kind == Kind::kValues) {
      const size_t count = checked_count(argument, kind == Kind::kKeys);
      put_length(head, count);
      for (size_t i = 0; i < count; ++i) {
        const nb::object each(argument[i]);
        put_field(head, kind == Kind::kKeys ? key_of(each) : value_of(each));
      }
    } else if constexpr (kind == Kind::kFlag) {
      head.push_back(argument ? '\1' : '\0');
    } else {
      store::put(head, static_cast<uint64_t>(argument));
    }
  }
};

// Call `use` with each field of a reply's body.
template <class Use>
void for_each_field(std::string_view body, Use use) {
  try {
    for (BodyReader reader(body); !reader.at_end();) use(reader.take_field());
  } catch (const ProtocolError& error) {
    raise_error("DistStoreError", "the store's server sent a malformed reply: " + error.reason);
  }
}

BytesList values_in(std::string_view body) {
  BytesList values;
  for_each_field(body, [&](std::string_view value) { values.append(as_bytes(value)); });
  return values;
}

StrList keys_in(std::string_view body) {
  StrList keys;
  // Another client's key need not be UTF-8.
  for_each_field(body, [&](std::string_view key) {
    keys.append(nb::steal(PyUnicode_DecodeUTF8(key.data(), static_cast<Py_ssize_t>(key.size()), "replace")));
  });
  return keys;
}

template <Result result>
auto result_in(const Reply& reply) {
  if constexpr (result == Result::kValue) return as_bytes(reply.body);
  if constexpr (result == Result::kValues) return values_in(reply.body);
  if constexpr (result == Result::kValuesOrValue) {
    using Found = std::variant<BytesList, nb::bytes>;
    return reply.status == Status::kUnless ? Found(as_bytes(reply.body)) : Found(values_in(reply.body));
  }
  if constexpr (result == Result::kKeys) return keys_in(reply.body);
  if constexpr (result == Result::kAmount) return number_in<int64_t>(reply.body);
  if constexpr (result == Result::kCount) return number_in<uint64_t>(reply.body);
  if constexpr (result == Result::kFlag) return number_in<uint8_t>(reply.body) != 0;
}

// The keys of a request, for an error: its first argument.
nb::object keys_of(nb::tuple arguments) {
  if (arguments.size() == 0) return arguments;
  const nb::object first = arguments[0];
  return PyUnicode_Check(first.ptr()) ? nb::object(nb::make_tuple(first)) : first;
}

// Raise StoreTimeout, QueueEmptyError, StoreLimitError or DistStoreError for a reply without a result.
[[noreturn]] void raise_failure(const StoreRequest& request, const Reply& reply, double seconds, nb::object keys) {
  if (reply.status == Status::kCancelled) {
    nb::dict arguments;
    arguments["keys"] = keys;
    arguments["seconds"] = seconds;
    arguments["what"] = request.waits == Waits::kForKeys ? "wait" : request.name;
    raise_error("StoreTimeout", arguments);
  }
  if (reply.status == Status::kQueueEmpty) raise_error("QueueEmptyError", std::string("queue is empty"));
  if (reply.status == Status::kTooLarge) raise_limit("a value", number_in<uint64_t>(reply.body), kMaxValueBytes);
  raise_error("DistStoreError", reply.body);
}

// Add the method of one request, which takes the arguments of its parameters and the seconds that it may last.
template <size_t row, size_t... I>
void bind_request(nb::handle owner, std::index_sequence<I...>) {
  static constexpr const StoreRequest& kRequest = kRequests[row];
  nb::cpp_function_def(
      [](StoreRequests& store, Argument<kRequests[row].parameters[I].kind>... arguments, double seconds) {
        Body body;
        (body.put<kRequests[row].parameters[I].kind>(arguments, I + 1 == sizeof...(I)), ...);
        const size_t size = body.head.size() + body.tail.size();
        if (size > kMaxFrameBytes) raise_limit("a request", size, kMaxFrameBytes);
        const Reply reply = store.request(kRequest.op, body.head, body.tail, seconds);
        const bool is_unless = kRequest.result == Result::kValuesOrValue && reply.status == Status::kUnless;
        if (reply.status != Status::kOk && !is_unless) {
          raise_failure(kRequest, reply, seconds, keys_of(nb::make_tuple(arguments...)));
        }
        return result_in<kRequest.result>(reply);
      },
      nb::scope(owner), nb::name(kRequest.name), nb::is_method(),
      named<kRequests[row].parameters[I].kind>(kRequest.parameters[I].name)..., nb::arg("seconds"));
}

template <Scope scope, size_t row = 0>
void bind_requests(nb::handle owner) {
  if constexpr (row < kRequests.size()) {
    if constexpr (kRequests[row].scope == scope) {
      bind_request<row>(owner, std::make_index_sequence<kRequests[row].count()>());
    }
    bind_requests<scope, row + 1>(owner);
  }
}

nb::bytes hmac_sha256(nb::bytes key, nb::bytes message) {
  const Digest digest = procgroup::hmac_sha256(bytes_of(key), bytes_of(message));
  return nb::bytes(digest.data(), digest.size());
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

void bind_client_requests(nb::handle owner) { bind_requests<Scope::kClient>(owner); }

}  // namespace procgroup::store

void bind_stores(nb::module_& module) {
  using namespace procgroup::store;
  module.def("hmac_sha256", &hmac_sha256, nb::arg("key"), nb::arg("message"));
  bind_requests<Scope::kEveryStore>(nb::class_<StoreRequests>(module, "StoreRequests"));
  bind_tcp_store(module);
  bind_local_stores(module);
}
