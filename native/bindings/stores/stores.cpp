// Everything of procgroup._native that belongs to stores, and the digest with which both sides prove a job's key.
#include "bindings/stores/stores.hpp"

#include "base/sha256.hpp"
#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace {

nb::bytes hmac_sha256(nb::bytes key, nb::bytes message) {
  const procgroup::Digest digest = procgroup::hmac_sha256({key.c_str(), key.size()}, {message.c_str(), message.size()});
  return nb::bytes(digest.data(), digest.size());
}

}  // namespace

void bind_stores(nb::module_& module) {
  module.def("hmac_sha256", &hmac_sha256, nb::arg("key"), nb::arg("message"));
  procgroup::store::bind_requests(module);
  procgroup::store::bind_tcp_store(module);
  procgroup::store::bind_in_process_store(module);
  procgroup::store::bind_table(module);
}
