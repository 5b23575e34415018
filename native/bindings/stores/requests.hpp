// The methods of a key-value store as Python calls them, whatever answers the requests.
//
// A method checks its arguments, encodes them as a request's body (see store/protocol.hpp), has the request run, and
// decodes the reply. Failures become exceptions of procgroup.errors.
#pragma once

#include <variant>

#include "bindings/stores/bodies.hpp"
#include "store/request.hpp"

namespace procgroup::store {

class StoreRequests {
 public:
  virtual ~StoreRequests() = default;

  void set(nanobind::handle key, nanobind::handle value, double seconds);
  nanobind::bytes get(nanobind::handle key, double seconds);
  void wait(Keys keys, double seconds);
  int64_t add(nanobind::handle key, int64_t amount, double seconds);
  bool check(Keys keys, double seconds);
  nanobind::bytes compare_set(nanobind::handle key, nanobind::handle expected, nanobind::handle desired,
                              double seconds);
  bool delete_key(nanobind::handle key, double seconds);
  uint64_t num_keys(double seconds);
  nanobind::typed<nanobind::list, nanobind::str> list_keys(nanobind::handle prefix, double seconds);
  void append(nanobind::handle key, nanobind::handle value, double seconds);
  nanobind::typed<nanobind::list, nanobind::bytes> multi_get(Keys keys, double seconds);
  // A list of the values of the keys; or, as bytes, the value of `unless` when that comes first.
  std::variant<nanobind::typed<nanobind::list, nanobind::bytes>, nanobind::bytes> get_unless(Keys keys,
                                                                                             nanobind::handle unless,
                                                                                             double seconds);
  void multi_set(Keys keys, Values values, double seconds);
  void queue_push(nanobind::handle key, nanobind::handle value, double seconds);
  nanobind::bytes queue_pop(nanobind::handle key, bool block, double seconds);
  uint64_t queue_len(nanobind::handle key, double seconds);
  void barrier(nanobind::handle key, uint64_t world_size, double seconds);

 protected:
  // Run one request, whose body is `head` followed by `tail`, and return its reply; kCancelled when `seconds` pass
  // first. Called with the interpreter's lock held.
  virtual Reply request(Op op, std::string_view head, std::string_view tail, double seconds) = 0;

  // Run a request and return its reply, whose status is kOk or kUnless. Raises StoreLimitError, QueueEmptyError,
  // DistStoreError, or StoreTimeout, which says `what` timed out for which `keys`.
  Reply run(Op op, std::string_view head, std::string_view tail, double seconds, const char* what,
            nanobind::handle keys);
};

}  // namespace procgroup::store
