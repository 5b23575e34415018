// The stores without a server: for the threads of one process, and for Python code that decides which requests it runs,
// as a store on a file does.
//
// ForwardedRequests gives each request of a store's methods to a Python function. That function may run it on a
// StoreTable, which is deterministic: a table that runs the same requests in the same order has the same keys.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "bindings/python_host.hpp"
#include "bindings/stores/stores.hpp"
#include "store/in_process_store.hpp"
#include "store/table.hpp"

namespace nb = nanobind;

namespace procgroup::store {
namespace {

class PythonInProcessStore final : public StoreRequests {
 public:
  PythonInProcessStore() : store_(std::make_unique<InProcessStore>()) {}

  PythonInProcessStore* clone() const {
    return guarded([&](const Check&) { return new PythonInProcessStore(store_->clone()); });
  }
  void close() { store_->close(); }

 private:
  explicit PythonInProcessStore(std::unique_ptr<InProcessStore> store) : store_(std::move(store)) {}

  Reply request(Op op, std::string_view head, std::string_view tail, double seconds) override {
    return guarded(
        [&](const Check& check) { return store_->request(op, head, tail, Deadline::after(seconds), check); });
  }

  // Call the function without the interpreter's lock, and raise what goes wrong with the lock. The function calls the
  // check, which runs the handlers of signals, time and again while it waits.
  template <class Function>
  static std::invoke_result_t<Function, const Check&> guarded(Function&& function) {
    try {
      Unlocked unlocked;
      return function([&unlocked] { unlocked.check_signals(); });
    } catch (const ForkedStore&) {
      raise_error("ForkedProcessError", std::string("a HashStore"));
    } catch (const ClosedStore&) {
      raise_error("DistStoreError", std::string("this HashStore was closed"));
    }
  }

  const std::unique_ptr<InProcessStore> store_;
};

class ForwardedRequests final : public StoreRequests {
 public:
  // Given an operation, its body and the seconds that it may take, returns the status and the body of the reply.
  using Run = nb::typed<nb::callable, nb::typed<nb::tuple, nb::int_, nb::bytes>(nb::int_, nb::bytes, nb::float_)>;

  explicit ForwardedRequests(Run run) : run_(std::move(run)) {}

 private:
  Reply request(Op op, std::string_view head, std::string_view tail, double seconds) override {
    std::string body;
    body.reserve(head.size() + tail.size());
    body.append(head).append(tail);
    const nb::object answer = run_(static_cast<int>(op), as_bytes(body), seconds);
    const auto [status, bytes] = nb::cast<std::tuple<int, nb::bytes>>(answer);
    return {static_cast<Status>(status), std::string(bytes_of(bytes))};
  }

  // Must not refer to this object: such a cycle would never be collected.
  const Run run_;
};

class StoreTable {
 public:
  // The caller and number of a request, and the status and body of its reply.
  using Replied = nb::typed<nb::tuple, nb::int_, nb::int_, nb::int_, nb::bytes>;

  // Run a request and return the replies that it leads to: its own, unless it waits, and those of requests that waited.
  nb::typed<nb::list, Replied> run(uint64_t caller, uint32_t number, int op, nb::bytes body) {
    answers_.clear();
    try {
      table_.run({caller, number}, static_cast<Op>(op), bytes_of(body));
    } catch (const ProtocolError& error) {
      raise_error("DistStoreError", "a malformed request to a store: " + error.reason);
    }
    nb::typed<nb::list, Replied> replies;
    for (const auto& [ticket, answer] : answers_) {
      const Reply reply = answer.to_reply();
      replies.append(
          nb::make_tuple(ticket.connection, ticket.request, static_cast<int>(reply.status), as_bytes(reply.body)));
    }
    return replies;
  }
  uint64_t changes() const { return table_.changes(); }

 private:
  std::vector<std::pair<Ticket, StoreAnswer>> answers_;
  Table table_{[this](Ticket ticket, StoreAnswer&& answer) { answers_.emplace_back(ticket, std::move(answer)); }};
};

}  // namespace

void bind_local_stores(nb::module_& module) {
  nb::class_<PythonInProcessStore, StoreRequests>(module, "InProcessStore")
      .def(nb::init<>())
      .def("clone", &PythonInProcessStore::clone)
      .def("close", &PythonInProcessStore::close);

  nb::class_<ForwardedRequests, StoreRequests>(module, "ForwardedRequests")
      .def(nb::init<ForwardedRequests::Run>(), nb::arg("run"));

  nb::class_<StoreTable>(module, "StoreTable")
      .def(nb::init<>())
      .def("run", &StoreTable::run, nb::arg("caller"), nb::arg("number"), nb::arg("op"), nb::arg("body"))
      .def_prop_ro("changes", &StoreTable::changes);
  module.attr("STORE_CANCEL") = static_cast<int>(Op::kCancel);
  module.attr("STORE_CANCELLED") = static_cast<int>(Status::kCancelled);
}

}  // namespace procgroup::store
