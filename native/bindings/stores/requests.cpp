#include "bindings/stores/requests.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "bindings/stores/stores.hpp"

namespace nb = nanobind;

namespace procgroup::store {
namespace {

[[noreturn]] void raise_timeout(const char* what, nb::handle keys, double seconds) {
  nb::dict arguments;
  arguments["keys"] = PyUnicode_Check(keys.ptr()) ? nb::object(nb::make_tuple(keys)) : nb::borrow(keys);
  arguments["seconds"] = seconds;
  arguments["what"] = what;
  raise_error("StoreTimeout", arguments);
}

}  // namespace

Reply StoreRequests::run(Op op, std::string_view head, std::string_view tail, double seconds, const char* what,
                         nb::handle keys) {
  if (head.size() + tail.size() > kMaxFrameBytes) raise_limit("a request", head.size() + tail.size(), kMaxFrameBytes);
  Reply reply = request(op, head, tail, seconds);
  switch (reply.status) {
    case Status::kOk:
      return reply;
    case Status::kUnless:
      if (op == Op::kGetUnless) return reply;
      break;
    case Status::kCancelled:
      raise_timeout(what, keys, seconds);
    case Status::kQueueEmpty:
      raise_error("QueueEmptyError", std::string("queue is empty"));
    case Status::kTooLarge:
      raise_limit("a value", number_in<uint64_t>(reply.body), kMaxValueBytes);
    case Status::kError:
      break;
  }
  raise_error("DistStoreError", reply.body);
}

void StoreRequests::set(nb::handle key, nb::handle value, double seconds) {
  const std::string_view bytes = value_of(value);
  run(Op::kSet, body_before_value(key, bytes), bytes, seconds, "set", key);
}

nb::bytes StoreRequests::get(nb::handle key, double seconds) {
  return as_bytes(run(Op::kGet, body_of_key(key), {}, seconds, "wait", key).body);
}

void StoreRequests::wait(Keys keys, double seconds) { run(Op::kWait, body_of_keys(keys), {}, seconds, "wait", keys); }

int64_t StoreRequests::add(nb::handle key, int64_t amount, double seconds) {
  std::string head = body_of_key(key);
  put(head, static_cast<uint64_t>(amount));
  return number_in<int64_t>(run(Op::kAdd, head, {}, seconds, "add", key).body);
}

bool StoreRequests::check(Keys keys, double seconds) {
  return number_in<uint8_t>(run(Op::kCheck, body_of_keys(keys), {}, seconds, "check", keys).body) != 0;
}

nb::bytes StoreRequests::compare_set(nb::handle key, nb::handle expected, nb::handle desired, double seconds) {
  const std::string_view bytes = value_of(desired);
  std::string head = body_of_key(key);
  put_field(head, value_of(expected));
  put_length(head, bytes.size());
  return as_bytes(run(Op::kCompareSet, head, bytes, seconds, "compare_set", key).body);
}

bool StoreRequests::delete_key(nb::handle key, double seconds) {
  return number_in<uint8_t>(run(Op::kDelete, body_of_key(key), {}, seconds, "delete_key", key).body) != 0;
}

uint64_t StoreRequests::num_keys(double seconds) {
  return number_in<uint64_t>(run(Op::kNumKeys, {}, {}, seconds, "num_keys", nb::tuple()).body);
}

nb::typed<nb::list, nb::str> StoreRequests::list_keys(nb::handle prefix, double seconds) {
  return keys_in(run(Op::kListKeys, body_of_key(prefix), {}, seconds, "list_keys", prefix).body);
}

void StoreRequests::append(nb::handle key, nb::handle value, double seconds) {
  const std::string_view bytes = value_of(value);
  run(Op::kAppend, body_before_value(key, bytes), bytes, seconds, "append", key);
}

nb::typed<nb::list, nb::bytes> StoreRequests::multi_get(Keys keys, double seconds) {
  return values_in(run(Op::kMultiGet, body_of_keys(keys), {}, seconds, "wait", keys).body);
}

std::variant<nb::typed<nb::list, nb::bytes>, nb::bytes> StoreRequests::get_unless(Keys keys, nb::handle unless,
                                                                                  double seconds) {
  const std::string body = body_of_key(unless) + body_of_keys(keys);
  const Reply reply = run(Op::kGetUnless, body, {}, seconds, "wait", keys);
  if (reply.status == Status::kUnless) return as_bytes(reply.body);
  return values_in(reply.body);
}

void StoreRequests::multi_set(Keys keys, Values values, double seconds) {
  run(Op::kMultiSet, body_of_pairs(keys, values), {}, seconds, "multi_set", keys);
}

void StoreRequests::queue_push(nb::handle key, nb::handle value, double seconds) {
  const std::string_view bytes = value_of(value);
  run(Op::kQueuePush, body_before_value(key, bytes), bytes, seconds, "queue_push", key);
}

nb::bytes StoreRequests::queue_pop(nb::handle key, bool block, double seconds) {
  std::string head = body_of_key(key);
  head.push_back(block ? '\1' : '\0');
  return as_bytes(run(Op::kQueuePop, head, {}, seconds, "wait", key).body);
}

uint64_t StoreRequests::queue_len(nb::handle key, double seconds) {
  return number_in<uint64_t>(run(Op::kQueueLength, body_of_key(key), {}, seconds, "queue_len", key).body);
}

void StoreRequests::barrier(nb::handle key, uint64_t world_size, double seconds) {
  std::string head = body_of_key(key);
  put(head, world_size);
  run(Op::kBarrier, head, {}, seconds, "barrier", key);
}

void bind_requests(nb::module_& module) {
  nb::class_<StoreRequests>(module, "StoreRequests")
      .def("set", &StoreRequests::set, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("get", &StoreRequests::get, nb::arg("key").none(), nb::arg("seconds"))
      .def("wait", &StoreRequests::wait, nb::arg("keys"), nb::arg("seconds"))
      .def("add", &StoreRequests::add, nb::arg("key").none(), nb::arg("amount"), nb::arg("seconds"))
      .def("check", &StoreRequests::check, nb::arg("keys"), nb::arg("seconds"))
      .def("compare_set", &StoreRequests::compare_set, nb::arg("key").none(), nb::arg("expected").none(),
           nb::arg("desired").none(), nb::arg("seconds"))
      .def("delete_key", &StoreRequests::delete_key, nb::arg("key").none(), nb::arg("seconds"))
      .def("num_keys", &StoreRequests::num_keys, nb::arg("seconds"))
      .def("list_keys", &StoreRequests::list_keys, nb::arg("prefix").none(), nb::arg("seconds"))
      .def("append", &StoreRequests::append, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("multi_get", &StoreRequests::multi_get, nb::arg("keys"), nb::arg("seconds"))
      .def("get_unless", &StoreRequests::get_unless, nb::arg("keys"), nb::arg("unless").none(), nb::arg("seconds"))
      .def("multi_set", &StoreRequests::multi_set, nb::arg("keys"), nb::arg("values"), nb::arg("seconds"))
      .def("queue_push", &StoreRequests::queue_push, nb::arg("key").none(), nb::arg("value").none(), nb::arg("seconds"))
      .def("queue_pop", &StoreRequests::queue_pop, nb::arg("key").none(), nb::arg("block"), nb::arg("seconds"))
      .def("queue_len", &StoreRequests::queue_len, nb::arg("key").none(), nb::arg("seconds"))
      .def("barrier", &StoreRequests::barrier, nb::arg("key").none(), nb::arg("world_size"), nb::arg("seconds"));
}

}  // namespace procgroup::store
