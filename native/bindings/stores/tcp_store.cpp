// The TCP store's server and client as Python objects.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bindings/python_host.hpp"
#include "bindings/stores/stores.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace nb = nanobind;

namespace procgroup::store {
namespace {

// The message of a DistNetworkError: why no connection was made, and what to do about it.
std::string explain(const ConnectFailure& failure, const std::string& host, int port, const std::string& job,
                    double seconds) {
  using Kind = ConnectFailure::Kind;
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
             std::to_string(kVersion) + ". Use one version of procgroup everywhere.";
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

class StoreClient final : public StoreRequests {
 public:
  // Connects within `seconds`, of which `spent` have passed already.
  StoreClient(std::vector<std::string> addresses, std::string host, int port, std::string job, nb::bytes job_key,
              uint32_t flags, double seconds, double spent)
      : host_(std::move(host)), port_(port), job_(std::move(job)) {
    Client::Options options{std::move(addresses), port, {job_, std::string(bytes_of(job_key))}, flags};
    try {
      Unlocked unlocked;
      client_ = std::make_unique<Client>(std::move(options), Deadline::after(std::max(0.0, seconds - spent)),
                                         [&unlocked] { unlocked.check_signals(); });
    } catch (const ConnectFailure& failure) {
      raise_error("DistNetworkError", explain(failure, host_, port_, job_, seconds));
    }
  }

  // Return the number of workers that have joined, after at least `count` have or `seconds` have passed.
  uint64_t wait_for_workers(uint64_t count, double seconds) {
    std::string body;
    put(body, count);
    const Reply reply = request(Op::kWorkers, body, {}, seconds);
    return reply.body.empty() ? 0 : number_in<uint64_t>(reply.body);
  }
  void close() { client_->close(); }

 private:
  Reply request(Op op, std::string_view head, std::string_view tail, double seconds) override {
    try {
      Unlocked unlocked;
      return client_->request(op, head, tail, Deadline::after(seconds), [&unlocked] { unlocked.check_signals(); });
    } catch (const ServerLost& lost) {
      nb::dict arguments;
      arguments["host"] = host_;
      arguments["port"] = port_;
      arguments["reason"] = lost.reason;
      raise_error("StoreLost", arguments);
    } catch (const ConnectFailure& failure) {
      raise_error("DistNetworkError", explain(failure, host_, port_, job_, seconds));
    }
  }

  const std::string host_;
  const int port_;
  const std::string job_;
  std::unique_ptr<Client> client_;
};

// (process id, "address:port", whether its client is of this process) of every connection that counts as a client.
nb::typed<nb::list, nb::typed<nb::tuple, nb::int_, nb::str, nb::bool_>> list_clients(const Server& server) {
  nb::typed<nb::list, nb::typed<nb::tuple, nb::int_, nb::str, nb::bool_>> clients;
  for (const Server::ClientInfo& client : server.list_clients()) {
    const bool is_own = ClientId::is_of_this_process(client.client);
    clients.append(nb::make_tuple(client.process, client.address, is_own));
  }
  return clients;
}

void start_server(Server* server, int listener, std::string job, nb::bytes job_key, bool answers_torch) {
  new (server) Server(listener, {std::move(job), std::string(bytes_of(job_key))}, answers_torch);
}

}  // namespace

void bind_tcp_store(nb::module_& module) {
  nb::class_<Server>(module, "StoreServer")
      .def("__init__", &start_server, nb::arg("listener"), nb::arg("job"), nb::arg("job_key"),
           nb::arg("answers_torch") = false)
      .def_prop_ro("port", &Server::port)
      .def_prop_ro("running", &Server::running)
      .def_prop_ro("clients", &Server::clients)
      .def_prop_ro("requests", &Server::requests)
      .def("list_clients", &list_clients)
      .def("stop", &Server::stop)
      .def("drain", &Server::drain)
      .def("forget_torch", &Server::forget_torch, nb::call_guard<Unlocked>());

  nb::class_<StoreClient, StoreRequests> client(module, "StoreClient");
  client
      .def(nb::init<std::vector<std::string>, std::string, int, std::string, nb::bytes, uint32_t, double, double>(),
           nb::arg("addresses"), nb::arg("host"), nb::arg("port"), nb::arg("job"), nb::arg("job_key"), nb::arg("flags"),
           nb::arg("seconds"), nb::arg("spent") = 0.0)
      .def("wait_for_workers", &StoreClient::wait_for_workers, nb::arg("count"), nb::arg("seconds"))
      .def("close", &StoreClient::close);
  bind_client_requests(client);
}

}  // namespace procgroup::store
