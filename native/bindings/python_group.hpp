// One process group as Python holds it: the verbs of procgroup.groups.backend.Backend.
//
// collectives.cpp turns arguments into requests; group.cpp runs them, and adds the class to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "input_iovecs.hpp"
#include "python_engine.hpp"

namespace procgroup {

class PythonGroup {
 public:
  PythonGroup(std::shared_ptr<PythonEngine> engine, uint64_t id, std::string name, std::vector<int> members, int rank,
              std::vector<int> hosts)
      : engine_(std::move(engine)),
        group_(make_group(engine_->engine(), GroupOptions{.id = id,
                                                          .name = std::move(name),
                                                          .members = std::move(members),
                                                          .rank = rank,
                                                          .hosts = std::move(hosts)})) {}

  uint64_t offset() const { return group_->offset(); }
  void reduce_in_rank_order() { group_->reduce_in_rank_order(); }
  void attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts) { group_->attach(offsets, hosts); }
  // `call` says in words what is called; `data` names the call for an error: op, sequence, group, rank, size.
  void handshake(const std::string& call, const nb::dict& data, double seconds);
  std::vector<uint64_t> refused() const { return group_->refused(); }
  bool is_broken() const { return group_->is_completed(); }
  bool is_idle() const { return group_->is_idle(); }
  void leave();
  void abort();

  // The same group once more, whose verbs check their arguments, return None and do nothing else.
  PythonGroup checks() const;

  // The parameters are those of the protocol, in its order.
  nb::object broadcast(nb::handle array, int root, bool async_op, double seconds);
  nb::object reduce(nb::handle array, int root, nb::handle op, bool async_op, double seconds);
  // Operations that reduce one array of each rank into that array, without a root.
  nb::object reduce_in_place(OpKind kind, nb::handle array, nb::handle op, bool async_op, double seconds);
  // A list of operations, or None: see assign_packs.
  nb::object all_reduce_coalesced(nb::handle arrays, nb::handle ops, bool async_op, double seconds);
  nb::object gather(nb::handle array, nb::handle outputs, int root, bool async_op, double seconds);
  nb::object all_gather(nb::handle outputs, nb::handle array, bool async_op, double seconds);
  nb::object all_gather_single(nb::handle output, nb::handle array, bool async_op, double seconds);
  nb::object scatter(nb::handle array, nb::handle inputs, int root, bool async_op, double seconds);
  nb::object reduce_scatter(nb::handle output, nb::handle inputs, nb::handle op, bool async_op, double seconds);
  nb::object reduce_scatter_single(nb::handle output, nb::handle array, nb::handle op, bool async_op, double seconds);
  nb::object all_to_all(nb::handle outputs, nb::handle inputs, bool async_op, double seconds);
  nb::object all_to_all_single(nb::handle output, nb::handle array, nb::handle output_splits, nb::handle input_splits,
                               bool async_op, double seconds);
  nb::object barrier(bool async_op, double seconds);
  nb::object send(nb::handle array, int destination, uint64_t tag, bool async_op, double seconds);
  nb::object recv(nb::handle array, int source, uint64_t tag, bool async_op, double seconds);

  // Broadcast from this rank, and all_gather, of an array of bytes that lies in several buffers: see InputIovecs. The
  // other ranks make the ordinary calls.
  void broadcast_iovecs(nb::handle buffers, nb::handle offsets, size_t bytes, double seconds);
  void all_gather_iovecs(nb::handle outputs, nb::handle buffers, nb::handle offsets, size_t bytes, double seconds);

 private:
  bool was_forked() const;
  CallSite site(const char* function) const { return {function, *group_}; }

  // Run it here, or, with `async_op`, start it and keep what it works on until it is over.
  nb::object issue(Request request, bool async_op, double seconds, ArrayView& view);
  nb::object issue(Request request, bool async_op, double seconds, std::shared_ptr<Issued> issued);
  nb::object run(Request& request, double seconds);
  void run_iovecs(Request& request, const InputIovecs& input, double seconds);
  nb::object message(OpKind op, ArrayView view, int peer, uint64_t tag, bool async_op, double seconds);
  nb::object over(int source);
  template <class Start>
  nb::object adopt(std::shared_ptr<Issued> issued, Start start);

  std::shared_ptr<PythonEngine> engine_;
  std::shared_ptr<Group> group_;
  bool only_checks_ = false;
  std::map<int, nb::object> over_;  // see over()
};

}  // namespace procgroup
