// The TCP store's server and client as Python objects. Errors become those of procgroup.errors.
#include <Python.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <variant>
#include <vector>

#include "bindings.hpp"
#include "python_host.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace nb = nanobind;
namespace store = procgroup::store;

namespace {

using Keys = nb::typed<nb::sequence, nb::str>;
using Values = nb::typed<nb::sequence, nb::object>;

[[noreturn]] void raise(const char* error, const nb::dict& data) {
  const nb::object type = nb::module_::import_("procgroup.errors").attr(error);
  const nb::object made = type(**data);
  PyErr_SetObject(type.ptr(), made.ptr());
  throw nb::python_error();
}

[[noreturn]] void raise(const char* error, const std::string& text) {
  const nb::object type = nb::module_::import_("procgroup.errors").attr(error);
  // What a server sent need not be UTF-8.
  const auto size = static_cast<Py_ssize_t>(text.size());
  const nb::object words = nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "replace"));
  PyErr_SetObject(type.ptr(), words.ptr());
  throw nb::python_error();
}

[[noreturn]] void raise_limit(const char* what, size_t size, size_t limit) {
  nb::dict data;
  data["what"] = what;
  data["size"] = size;
  data["limit"] = limit;
  raise("StoreLimitError", data);
}

// The UTF-8 bytes of a str, which live as long as it does.
std::string_view text_of(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) throw nb::python_error();
  return {bytes, static_cast<size_t>(size)};
}

std::string class_name(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

std::string_view key_of(nb::handle key) {
  if (!PyUnicode_Check(key.ptr())) {
    throw nb::type_error(("expected key to be str, got " + class_name(key)).c_str());
  }
  const std::string_view bytes = text_of(key);
  if (bytes.size() > store::kMaxKeyBytes) raise_limit("a key", bytes.size(), store::kMaxKeyBytes);
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
  if (bytes.size() > store::kMaxValueBytes) raise_limit("a value", bytes.size(), store::kMaxValueBytes);
  return bytes;
}

std::string field(std::string_view bytes) {
  std::string body;
  body.reserve(bytes.size() + 4);
  store::put_field(body, bytes);
  return body;
}

// A key, and the length of the value that follows it as the request's tail.
std::string head_for(nb::handle key, std::string_view value) {
  std::string head = field(key_of(key));
  store::put_length(head, value.size());
  return head;
}

nb::bytes as_bytes(const std::string& body) { return nb::bytes(body.data(), body.size()); }

// Take a reply's body apart.
template <class Read>
auto parsed(const std::string& body, Read read) {
  try {
    store::BodyReader reader(body);
    return read(reader);
  } catch (const store::ProtocolError& error) {
    raise("DistStoreError", "the store's server sent what is no reply to the request: " + error.reason);
  }
}

template <class Number>
Number number_in(const std::string& body) {
  return parsed(body, [](store::BodyReader& reader) { return reader.take<Number>(); });
}

void look_for_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

const store::Check kCheckSignals = look_for_signals;

std::string explain(const store::ConnectFailure& failure, const std::string& host, int port, const std::string& job,
                    double seconds) {
  using Kind = store::ConnectFailure::Kind;
  const std::string place = host + ":" + std::to_string(port);
  switch (failure.kind) {
    case Kind::kTimeout:
      return "The client socket has timed out after " + std::to_string(std::llround(seconds * 1000)) +
             "ms while trying to connect to (" + host + ", " + std::to_string(port) +
             "). Last attempt: " + failure.detail + ". Start the process that hosts the store, or correct the address.";
    case Kind::kNotAStore:
      return place + " is not a procgroup store: " + failure.detail +
             ". Another program listens there; choose another port.";
    case Kind::kOtherVersion:
      return "the store at " + place + " speaks version " + failure.detail + " of the protocol, this process version " +
             std::to_string(store::kVersion) + ". Use one version of procgroup everywhere.";
    case Kind::kOtherJob:
      return place + " belongs to another job, '" + failure.detail + "'; this process is in job '" + job +
             "'. Choose another port.";
    case Kind::kKeyNeeded:
      return place +
             " belongs to a job with a key, and this process has none. It is another job's port, or "
             "PROCGROUP_JOB_KEY is missing here.";
    case Kind::kWrongKey:
      return place +
             " belongs to another job: it has another key than this process. Choose another port, or set "
             "the same PROCGROUP_JOB_KEY everywhere.";
    case Kind::kServerHasNoKey:
      return place +
             " does not prove this job's key. It is another job's port, or its process was started without "
             "PROCGROUP_JOB_KEY.";
    case Kind::kFull:
      return "the store at " + place + " has as many connections as it takes (" + failure.detail + ").";
  }
  return place;
}

class StoreClient {
 public:
  // Connects within `seconds`, of which `spent` have passed already.
  StoreClient(std::vector<std::string> addresses, std::string host, int port, std::string job, nb::bytes job_key,
              uint32_t flags, double seconds, double spent)
      : host_(std::move(host)), port_(port), job_(std::move(job)) {
    store::Client::Options options{std::move(addresses), port, {job_, {job_key.c_str(), job_key.size()}}, flags};
    guarded(seconds, [&] {
      const auto deadline = procgroup::Deadline::after(std::max(0.0, seconds - spent));
      client_ = std::make_unique<store::Client>(std::move(options), deadline, kCheckSignals);
    });
  }

  void set(nb::handle key, nb::handle value, double seconds) {
    const std::string_view bytes = value_of(value);
    ask(store::Op::kSet, head_for(key, bytes), bytes, seconds, "set", key);
  }
  nb::bytes get(nb::handle key, double seconds) {
    return as_bytes(ask(store::Op::kGet, field(key_of(key)), {}, seconds, "wait", key).body);
  }
  void wait(Keys keys, double seconds) { ask(store::Op::kWait, fields(keys), {}, seconds, "wait", keys); }
  int64_t add(nb::handle key, int64_t amount, double seconds) {
    std::string head = field(key_of(key));
    store::put(head, static_cast<uint64_t>(amount));
    return number_in<int64_t>(ask(store::Op::kAdd, head, {}, seconds, "add", key).body);
  }
  bool check(Keys keys, double seconds) {
    return number_in<uint8_t>(ask(store::Op::kCheck, fields(keys), {}, seconds, "check", keys).body) != 0;
  }
  nb::bytes compare_set(nb::handle key, nb::handle expected, nb::handle desired, double seconds) {
    const std::string_view bytes = value_of(desired);
    std::string head = field(key_of(key));
    store::put_field(head, value_of(expected));
    store::put_length(head, bytes.size());
    return as_bytes(ask(store::Op::kCompareSet, head, bytes, seconds, "compare_set", key).body);
  }
  bool delete_key(nb::handle key, double seconds) {
    return number_in<uint8_t>(ask(store::Op::kDelete, field(key_of(key)), {}, seconds, "delete_key", key).body) != 0;
  }
  uint64_t num_keys(double seconds) {
    return number_in<uint64_t>(ask(store::Op::kNumKeys, {}, {}, seconds, "num_keys", nb::tuple()).body);
  }
  nb::typed<nb::list, nb::str> list_keys(nb::handle prefix, double seconds) {
    const std::string body = ask(store::Op::kListKeys, field(key_of(prefix)), {}, seconds, "list_keys", prefix).body;
    return parsed(body, [](store::BodyReader& reader) {
      nb::typed<nb::list, nb::str> keys;
      while (!reader.at_end()) {
        const std::string_view key = reader.take_field();
        // Another client's key need not be UTF-8.
        keys.append(nb::steal(PyUnicode_DecodeUTF8(key.data(), static_cast<Py_ssize_t>(key.size()), "replace")));
      }
      return keys;
    });
  }
  void append(nb::handle key, nb::handle value, double seconds) {
    const std::string_view bytes = value_of(value);
    ask(store::Op::kAppend, head_for(key, bytes), bytes, seconds, "append", key);
  }
  nb::typed<nb::list, nb::bytes> multi_get(Keys keys, double seconds) {
    return values_in(ask(store::Op::kMultiGet, fields(keys), {}, seconds, "wait", keys).body);
  }
  // A list of the values of the keys; or, as bytes, the value of `unless` when that comes first.
  std::variant<nb::typed<nb::list, nb::bytes>, nb::bytes> get_unless(Keys keys, nb::handle unless, double seconds) {
    const std::string body = field(key_of(unless)) + fields(keys);
    const store::ServerReply reply = ask(store::Op::kGetUnless, body, {}, seconds, "wait", keys);
    if (reply.status == store::Status::kUnless) return as_bytes(reply.body);
    return values_in(reply.body);
  }
  void set_on_disconnect(nb::handle key, nb::handle value, double seconds) {
    const std::string_view bytes = value_of(value);
    ask(store::Op::kSetOnDisconnect, head_for(key, bytes), bytes, seconds, "set_on_disconnect", key);
  }
  void withdraw_on_disconnect(nb::handle key, double seconds) {
    ask(store::Op::kWithdrawOnDisconnect, field(key_of(key)), {}, seconds, "withdraw_on_disconnect", key);
  }
  void multi_set(Keys keys, Values values, double seconds) {
    std::string head;
    const size_t count = checked_count(keys);
    for (size_t i = 0; i < count; ++i) {
      store::put_field(head, key_of(nb::object(keys[i])));
      store::put_field(head, value_of(nb::object(values[i])));
    }
    ask(store::Op::kMultiSet, head, {}, seconds, "multi_set", keys);
  }
  void queue_push(nb::handle key, nb::handle value, double seconds) {
    const std::string_view bytes = value_of(value);
    ask(store::Op::kQueuePush, head_for(key, bytes), bytes, seconds, "queue_push", key);
  }
  nb::bytes queue_pop(nb::handle key, bool block, double seconds) {
    std::string head = field(key_of(key));
    head.push_back(block ? '\1' : '\0');
    return as_bytes(ask(store::Op::kQueuePop, head, {}, seconds, "wait", key).body);
  }
  uint64_t queue_len(nb::handle key, double seconds) {
    return number_in<uint64_t>(ask(store::Op::kQueueLength, field(key_of(key)), {}, seconds, "queue_len", key).body);
  }
  void barrier(nb::handle key, uint64_t world_size, double seconds) {
    std::string head = field(key_of(key));
    store::put(head, world_size);
    ask(store::Op::kBarrier, head, {}, seconds, "barrier", key);
  }
  // How many workers have joined, after at least `count` have or the time is over.
  uint64_t wait_for_workers(uint64_t count, double seconds) {
    std::string head;
    store::put(head, count);
    try {
      return number_in<uint64_t>(ask(store::Op::kWorkers, head, {}, seconds, "wait", nb::tuple()).body);
    } catch (const store::DeadlinePassed& passed) {
      return passed.body.empty() ? 0 : number_in<uint64_t>(passed.body);
    }
  }
  void close() { client_->close(); }

 private:
  static size_t checked_count(nb::sequence keys) {
    if (PyUnicode_Check(keys.ptr()) || PyBytes_Check(keys.ptr())) {
      throw nb::type_error("expected keys to be a sequence of str, got one str");
    }
    const size_t count = nb::len(keys);
    if (count > store::kMaxKeysPerRequest) raise_limit("a list of keys", count, store::kMaxKeysPerRequest);
    return count;
  }

  static nb::typed<nb::list, nb::bytes> values_in(const std::string& body) {
    return parsed(body, [](store::BodyReader& reader) {
      nb::typed<nb::list, nb::bytes> values;
      while (!reader.at_end()) {
        const std::string_view value = reader.take_field();
        values.append(nb::bytes(value.data(), value.size()));
      }
      return values;
    });
  }

  static std::string fields(nb::sequence keys) {
    std::string body;
    const size_t count = checked_count(keys);
    for (size_t i = 0; i < count; ++i) store::put_field(body, key_of(nb::object(keys[i])));
    return body;
  }

  // Runs without the GIL; what goes wrong is raised with it.
  template <class Function>
  void guarded(double seconds, Function&& function) {
    try {
      const procgroup::Unlocked unlocked;
      function();
    } catch (const store::ServerLost& lost) {
      nb::dict data;
      data["host"] = host_;
      data["port"] = port_;
      data["reason"] = lost.reason;
      raise("StoreLost", data);
    } catch (const store::ConnectFailure& failure) {
      raise("DistNetworkError", explain(failure, host_, port_, job_, seconds));
    }
  }

  store::ServerReply ask(store::Op op, std::string_view head, std::string_view tail, double seconds, const char* what,
                         nb::handle keys) {
    if (head.size() + tail.size() > store::kMaxFrameBytes) {
      raise_limit("a request", head.size() + tail.size(), store::kMaxFrameBytes);
    }
    store::ServerReply reply;
    try {
      guarded(seconds,
              [&] { reply = client_->request(op, head, tail, procgroup::Deadline::after(seconds), kCheckSignals); });
    } catch (const store::DeadlinePassed&) {
      if (op == store::Op::kWorkers) throw;
      raise_timeout(what, keys, seconds);
    }
    if (reply.status == store::Status::kOk || (reply.status == store::Status::kUnless && op == store::Op::kGetUnless)) {
      return reply;
    }
    if (reply.status == store::Status::kQueueEmpty) raise("QueueEmptyError", std::string("queue is empty"));
    if (reply.status == store::Status::kTooLarge) {
      raise_limit("a value", number_in<uint64_t>(reply.body), store::kMaxValueBytes);
    }
    raise("DistStoreError", reply.body);
  }

  [[noreturn]] static void raise_timeout(const char* what, nb::handle keys, double seconds) {
    nb::dict data;
    data["keys"] = PyUnicode_Check(keys.ptr()) ? nb::object(nb::make_tuple(keys)) : nb::borrow(keys);
    data["seconds"] = seconds;
    data["what"] = what;
    raise("StoreTimeout", data);
  }

  const std::string host_;
  const int port_;
  const std::string job_;
  std::unique_ptr<store::Client> client_;
};

// (process id, "address:port", whether its client is of this process) of every connection that counts as a guest.
nb::typed<nb::list, nb::typed<nb::tuple, nb::int_, nb::str, nb::bool_>> list_guests(const store::Server& server) {
  nb::typed<nb::list, nb::typed<nb::tuple, nb::int_, nb::str, nb::bool_>> guests;
  for (const store::Server::Guest& guest : server.list_guests()) {
    const bool is_own = store::ClientId::is_of_this_process(guest.client);
    guests.append(nb::make_tuple(guest.process, guest.address, is_own));
  }
  return guests;
}

void start_server(store::Server* place, int listener, std::string job, nb::bytes job_key, bool answers_torch) {
  new (place) store::Server(listener, {std::move(job), {job_key.c_str(), job_key.size()}}, answers_torch);
}

nb::bytes hmac_sha256(nb::bytes key, nb::bytes message) {
  const procgroup::Digest digest = procgroup::hmac_sha256({key.c_str(), key.size()}, {message.c_str(), message.size()});
  return nb::bytes(digest.data(), digest.size());
}

}  // namespace

void bind_stores(nb::module_& module) {
  module.def("hmac_sha256", &hmac_sha256, nb::arg("key"), nb::arg("message"));

  nb::class_<store::Server>(module, "StoreServer")
      .def("__init__", &start_server, nb::arg("listener"), nb::arg("job"), nb::arg("job_key"),
           nb::arg("answers_torch") = false)
      .def_prop_ro("port", &store::Server::port)
      .def_prop_ro("running", &store::Server::running)
      .def_prop_ro("guests", &store::Server::guests)
      .def_prop_ro("requests", &store::Server::requests)
      .def("list_guests", &list_guests)
      .def("stop", &store::Server::stop)
      .def("drain", &store::Server::drain)
      .def("forget_torch", &store::Server::forget_torch, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<StoreClient>(module, "StoreClient")
      .def(nb::init<std::vector<std::string>, std::string, int, std::string, nb::bytes, uint32_t, double, double>(),
           nb::arg("addresses"), nb::arg("host"), nb::arg("port"), nb::arg("job"), nb::arg("job_key"), nb::arg("flags"),
           nb::arg("seconds"), nb::arg("spent") = 0.0)
      .def("set", &StoreClient::set, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("get", &StoreClient::get, nb::arg("key").none(), nb::arg("seconds"))
      .def("wait", &StoreClient::wait, nb::arg("keys"), nb::arg("seconds"))
      .def("add", &StoreClient::add, nb::arg("key").none(), nb::arg("amount"), nb::arg("seconds"))
      .def("check", &StoreClient::check, nb::arg("keys"), nb::arg("seconds"))
      .def("compare_set", &StoreClient::compare_set, nb::arg("key").none(), nb::arg("expected").none(),
           nb::arg("desired").none(), nb::arg("seconds"))
      .def("delete_key", &StoreClient::delete_key, nb::arg("key").none(), nb::arg("seconds"))
      .def("num_keys", &StoreClient::num_keys, nb::arg("seconds"))
      .def("list_keys", &StoreClient::list_keys, nb::arg("prefix").none(), nb::arg("seconds"))
      .def("append", &StoreClient::append, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("multi_get", &StoreClient::multi_get, nb::arg("keys"), nb::arg("seconds"))
      .def("get_unless", &StoreClient::get_unless, nb::arg("keys"), nb::arg("unless").none(), nb::arg("seconds"))
      .def("set_on_disconnect", &StoreClient::set_on_disconnect, nb::arg("key").none(), nb::arg("value").none(),
           nb::arg("seconds"))
      .def("withdraw_on_disconnect", &StoreClient::withdraw_on_disconnect, nb::arg("key").none(), nb::arg("seconds"))
      .def("multi_set", &StoreClient::multi_set, nb::arg("keys"), nb::arg("values"), nb::arg("seconds"))
      .def("queue_push", &StoreClient::queue_push, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("queue_pop", &StoreClient::queue_pop, nb::arg("key").none(), nb::arg("block"), nb::arg("seconds"))
      .def("queue_len", &StoreClient::queue_len, nb::arg("key").none(), nb::arg("seconds"))
      .def("barrier", &StoreClient::barrier, nb::arg("key").none(), nb::arg("world_size"), nb::arg("seconds"))
      .def("wait_for_workers", &StoreClient::wait_for_workers, nb::arg("count"), nb::arg("seconds"))
      .def("close", &StoreClient::close);
}
