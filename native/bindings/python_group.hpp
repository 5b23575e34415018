// One process group as a Python object. Every call of the group, on any backend, enters here:
//
//     method      unless the group is in its ordinary state: pass the call to Python (`intercept`)
//                 read and check the arguments                                        collectives.cpp
//     issue       number, record and agree, then move the bytes: by the engine, or by the group's backend for
//                 arrays in host memory, or on a device. Arrays on a device whose call no backend makes there are
//                 copied to host memory and back                                      device_call.hpp
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "mpi_backend.hpp"
#include "python_engine.hpp"
#include "timeouts.hpp"
#include "work.hpp"

// In signatures: see timeouts.hpp.
#define PROCGROUP_TIMEOUT "datetime.timedelta | float | None"

namespace procgroup {

class PythonGroup {
 public:
  PythonGroup(std::shared_ptr<PythonEngine> engine, uint64_t id, std::string name, std::vector<int> members, int rank,
              std::vector<int> hosts);

  uint64_t offset() const { return group_->members().offset(); }
  void rename_ranks() { group_->rename_ranks(); }
  void reduce_in_rank_order() { group_->calls().reduce_in_rank_order(); }
  void attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts) { group_->attach(offsets, hosts); }
  // `call` describes the call; `data` identifies it for an error: op, sequence, group, rank, size.
  void handshake(const std::string& call, const nb::dict& data, double seconds);
  std::vector<uint64_t> refused() const { return group_->refused(); }
  bool is_broken() const { return group_->end().is_completed(); }
  bool has_lost_member() const { return group_->members().has_lost_member(); }
  bool is_idle() const { return group_->is_idle(); }
  const char* last_schedule() const { return group_->calls().last_schedule(); }
  void leave();
  nb::object take_unraised();
  nb::object lost() const;
  void abort();

  // A second object for the same group, whose methods check their arguments, return None and do nothing else.
  PythonGroup checks() const;
  // A second object for the same group, whose methods are not intercepted.
  PythonGroup direct() const;
  // Call `issue`, with an operation's name and arguments, in place of every method; None ends that. With `only_awaits`
  // it does no more than await the calls of compiled functions: those pass it by.
  void intercept(nb::object issue, bool only_awaits) {
    intercept_ = std::move(issue);
    queue_.reset();
    shared_->lets_compiled_pass = only_awaits || !is_intercepted();
  }
  bool is_intercepted() const { return intercept_.is_valid() && !intercept_.is_none(); }
  // Append the calls that can be coalesced to `queue` in place of `issue`, each as its name, its arguments up to
  // `async_op` and its timeout; they return None, or with `async_op` `work`. Until the next intercept().
  void queue_in(nb::list queue, nb::object work) { queue_ = std::move(queue), queued_work_ = std::move(work); }
  template <class... Arguments>
  nb::object pass_on(const char* op, Arguments... arguments) const {
    if constexpr (sizeof...(Arguments) > 2)
      if (queue_.is_valid() && can_be_coalesced(op)) return enqueue(op, nb::make_tuple(arguments...));
    return intercept_(op, arguments...);
  }
  // Let a backend move the bytes of calls, from the first one on, on all ranks: a program's own, given by
  // procgroup.groups.backend.prepare; MPI; or NCCL, for arrays on GPUs.
  void set_backend(nb::object prepare) { prepare_ = std::move(prepare); }
  void set_backend(MpiBackend communicator) { mpi_ = std::move(communicator); }
  void set_backend(std::shared_ptr<NcclBackend> backend);
  // Let a backend get ready, while the engine watches the other ranks: `start` is called, after all ranks have come,
  // and the generator that it returns is run to its end.
  nb::object open_backend(nb::object start, double seconds);

  // These calls of the group as one, which `op` names, with these arrays as its result.
  nb::object join(const nb::list& works, const std::string& op, nb::handle arrays) const;

  // The methods of the table of operations. With `retain`, a call that fails leaves its array as it was.
#include "collective_methods.inc"
  // Those that reduce one array of each rank into that array, without a root.
  template <OpKind kKind>
  nb::object reduce_in_place(nb::handle array, nb::handle op, bool retain, bool async_op, double seconds);
  // The calls of all packs as one: see assign_packs.
  nb::object all_reduce_coalesced(nb::handle arrays, nb::handle ops, bool retain, bool async_op, double seconds);
  // An all_gather_single of Python's integers, which the caller then combines by `op`. All ranks give the same op.
  nb::object all_gather_integers(nb::handle output, nb::handle array, int op, bool async_op, double seconds);
  // Memory on a GPU for an array of so many bytes, in a window of all ranks, which call it, too: see procgroup.empty.
  nb::object empty(size_t bytes, int device, double seconds);
  // Register memory that procgroup_allocate has given, by the addresses at which it begins, in windows of all ranks,
  // which call it, too: see ProcessGroup.register_mem_pool. Memory that is registered stays so.
  nb::object register_mem_pool(nb::handle addresses, double seconds);
  // From now on procgroup_allocate can be called.
  void lend_memory() const { lend_memory_of(loaded_nccl("mem_allocator").library()); }
  // Return when group rank `first`, and every other rank, has called it, too: see procgroup.rank_first.
  nb::object rank_first(int first, double seconds);
  // This rank, which is the first one, does not call it, because of an error: that ends the group.
  void fail_rank_first(const std::string& reason);
  nb::object send(nb::handle array, int destination, uint64_t tag, bool async_op, double seconds);
  nb::object recv(nb::handle array, int source, uint64_t tag, bool async_op, double seconds);
  // send and recv with a global rank and the timeout in force, if calls are not intercepted, `peer` is an int and a
  // member, and `tag` is an int and valid. Otherwise they return NotImplemented and do nothing.
  nb::object try_send(nb::handle array, nb::handle peer, nb::handle tag, bool async_op);
  nb::object try_recv(nb::handle array, nb::handle peer, nb::handle tag, bool async_op);
  // The timeout of calls without one of their own.
  void set_timeout(double seconds) { shared_->seconds = seconds; }
  // That of a call which is given None: see timeouts.hpp.
  double seconds_in_force() const { return context_seconds().value_or(shared_->seconds); }

  // For compiled functions, whose threads do not have the interpreter's lock: see xla.cpp.
  const std::shared_ptr<PythonEngine>& engine() const { return engine_; }
  const std::shared_ptr<Group>& group() const { return group_; }
  const std::shared_ptr<NcclBackend>& nccl() const { return nccl_; }
  double seconds() const { return shared_->seconds; }
  // Whether the engine makes their calls, without Python.
  bool runs_compiled() const { return shared_->lets_compiled_pass && !has_backend() && !engine_->forked(); }
  // The call site of a function of procgroup, for errors.
  CallSite site(const char* function) const { return {function, *group_}; }
  // The number of the line of the program that makes, or traces, a call now.
  uint32_t source_line() const { return engine_->forked() ? 0 : engine_->source_line(); }

  // Broadcast from this rank, and all_gather, of an array of bytes in several buffers: see InputIovecs. The
  // other ranks make the ordinary calls.
  nb::object broadcast_iovecs(nb::handle buffers, nb::handle offsets, size_t bytes, double seconds);
  nb::object all_gather_iovecs(nb::handle outputs, nb::handle buffers, nb::handle offsets, size_t bytes,
                               double seconds);
  // A function of procgroup.functional of what functional.cpp describes; NotImplemented, and nothing is done, for all
  // else. `root` and `source` are group ranks, of sendrecv the destination and the source; `combine` is what an
  // all_reduce of an integer returns for `op` and the integers of all ranks.
  nb::object functional(const char* name, nb::handle tree, int root, int source, nb::handle op, nb::handle combine,
                        uint64_t tag);
  // sendrecv with global ranks, as try_send has them.
  nb::object try_sendrecv(nb::handle tree, nb::handle dst, nb::handle src, uint64_t tag);
  // An all_gather of the headers of an object operation, and a message that is one: see object_headers.cpp. What this
  // rank sends is a packed header, or its objects, or, of a rank that sends none, their number. Where all headers hold
  // their objects as a whole, `loads` makes the objects of all ranks, or of each the one that is wanted unless that is
  // negative. exchange_objects returns the headers, the objects by rank or None, and the rank and the number of an
  // object that could not be made, with the error, or None; recv_objects the same of one header, and the sender. Before
  // they move anything they return None, and send_objects False, where the objects are not plain or do not fit into a
  // header. Only where no backend moves the bytes.
  nb::object exchange_objects(nb::handle given, int kind, int root, int count, nb::handle loads, int wanted,
                              double seconds);
  nb::object send_objects(nb::handle given, int kind, int destination, uint64_t tag, double seconds);
  // send_objects with a global rank, as try_send has it. Also False where `objects` is no list, or `dst` is this rank.
  nb::object try_send_objects(nb::handle objects, int kind, nb::handle dst, uint64_t tag);
  nb::object recv_objects(int kind, int count, int source, uint64_t tag, nb::handle loads, double seconds);

 private:
  static bool can_be_coalesced(std::string_view op) {
    return op == "all_reduce" || op == "all_gather_single" || op == "reduce_scatter_single";
  }
  nb::object enqueue(const char* op, const nb::tuple& arguments) const;
  bool was_forked() const;

  // How to issue a call; `results` is what the result() of its Work gives: see Work.
  struct Options {
    const char* op;
    nb::handle results;
    bool async_op;
    double seconds;
    bool retain = false;
  };

  nb::object all_gather_into(const char* op, nb::handle output, nb::handle array, std::optional<ReduceOp> combined_by,
                             bool async_op, double seconds);
  // Run the request here, or, with `async_op`, start it and keep its arrays until it has completed.
  nb::object issue(Request&& request, const Options& options, ArrayView& view);
  nb::object issue(Request&& request, const Options& options, std::shared_ptr<Issued> issued);
  nb::object issue_on_device(Request&& request, const Options& options, std::shared_ptr<Issued> issued);
  nb::object issue_to_nccl(Request&& request, const Options& options, std::shared_ptr<Issued> issued,
                           ArrayStreams used);
  nb::object capture(Request&& request, const Options& options, std::shared_ptr<Issued> issued,
                     const std::shared_ptr<NcclTask>& task);
  // The streams of the arrays, which are the call's from now on. Raises for a capture, unless the call
  // `can_be_captured`.
  void compare_orders(Request& request, const std::vector<ArrayView>& arrays, const char* op) const;
  ArrayStreams take_device_arrays(Issued& issued, const char* op, bool can_be_captured) const;
  nb::object run(Request& request, double seconds, const Issued* issued = nullptr);
  // Raise ArgumentError where the group has no NCCL, or uses another GPU.
  NcclBackend& loaded_nccl(const char* op) const;
  void require_gpu(const char* op, const std::string& what, int device) const;
  void register_memories(OpKind op, std::vector<std::shared_ptr<NcclMemory>> memories, double seconds);
  // MPI need not move what the engine's announcements carry in any case.
  bool needs_backend(const Request& request) const {
    return has_backend() && !(mpi_ && group_->calls().is_announced_whole(request.descriptor));
  }
  bool has_backend() const { return prepare_.is_valid() || mpi_ != nullptr; }
  void move_by_backend(Request& request, Issued& issued, std::vector<ArrayView> arrays, uint64_t tag = 0) const;
  void move_by_backend(MessageRequest& request, Issued& issued, std::shared_ptr<StagedTask> staged) const;
  void move_on_device(MessageRequest& request, Issued& issued, bool async_op, double seconds) const;
  // Whether a call on this array is staged through host memory: it is on a GPU, where no backend makes the call.
  bool is_staged(const ArrayView& view, OpKind op, ReduceOp reduce_op = {}) const;
  nb::object run_iovecs(Request& request, const InputIovecs& input, double seconds);
  struct Message {
    int peer;
    uint64_t tag;
  };
  std::optional<Message> ordinary_message(nb::handle peer, nb::handle tag) const;
  nb::object reduce_integer(nb::handle number, nb::handle op, nb::handle combine);
  int checked_source(int source) const;  // a group rank, or kAnySource
  // Run it here; return the sender's group rank.
  int run_message(const MessageRequest& request, double seconds, const Issued* issued = nullptr);
  nb::object message(OpKind op, nb::handle array, ArrayView view, int peer, uint64_t tag, bool async_op,
                     double seconds);
  // Start an operation, and keep its arrays until it has completed; and then make the Work that stands for it.
  template <class Start>
  void begin(const std::shared_ptr<Issued>& issued, Start start);
  template <class Start>
  nb::object adopt(const Options& options, std::shared_ptr<Issued> issued, Start start);

  std::shared_ptr<PythonEngine> engine_;
  std::shared_ptr<Group> group_;
  // What its copies share.
  struct Shared {
    std::atomic<double> seconds{0};
    std::atomic<bool> lets_compiled_pass{true};
    std::vector<std::weak_ptr<NcclMemory>> registered;  // of pools; with the interpreter's lock
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  bool only_checks_ = false;
  nb::object intercept_;
  nb::object queue_;  // null unless calls are coalesced
  nb::object queued_work_;
  nb::object prepare_;
  MpiBackend mpi_;                     // null unless MPI moves the bytes
  std::shared_ptr<NcclBackend> nccl_;  // null unless NCCL moves those of arrays on GPUs
};

template <class Start>
void PythonGroup::begin(const std::shared_ptr<Issued>& issued, Start start) {
  issued->group = group_;
  try {
    issued->operation = start();
  } catch (const OperationFailed& failed) {
    raise_what_a_transfer_raised();
    raise(build_exception(failed.failure, failed.call, *group_));
  }
  raise_what_a_transfer_raised();
  if (!issued->is_completed()) engine_->keep(issued);
}

template <class Start>
nb::object PythonGroup::adopt(const Options& options, std::shared_ptr<Issued> issued, Start start) {
  begin(issued, start);
  Work work(engine_, group_, options.op, options.results);
  work.add(std::move(issued));
  return nb::cast(std::move(work));
}

// A method that moves data, as bound to Python: every call of every group enters here. Its timeout in seconds is given
// as Python gives timeouts.
template <auto kMethod>
struct CallMethod;
template <class... Arguments, nb::object (PythonGroup::*kMethod)(Arguments...)>
struct CallMethod<kMethod> {
  template <class Argument>
  static constexpr bool kIsTimeout = std::is_same_v<Argument, double>;
  template <class Argument>
  using Given = std::conditional_t<kIsTimeout<Argument>, nb::handle, Argument>;

  template <class Argument>
  static Argument read(const PythonGroup& self, Given<Argument> given) {
    if constexpr (kIsTimeout<Argument>)
      return given.is_none() ? self.seconds_in_force() : seconds_of(given);
    else
      return given;
  }

  static nb::object enter(PythonGroup& self, const char* name, Arguments... arguments) {
    if (self.is_intercepted()) return self.pass_on(name, arguments...);
    return (self.*kMethod)(arguments...);
  }

  static auto named(const char* name) {
    return [name](PythonGroup& self, Given<Arguments>... given) {
      return enter(self, name, read<Arguments>(self, given)...);
    };
  }
};

// Add the methods of the table of operations.
void bind_collectives(nb::class_<PythonGroup>& group);

}  // namespace procgroup
