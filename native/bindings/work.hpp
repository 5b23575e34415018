// Work: what a call with async_op=True returns.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python_engine.hpp"

namespace procgroup {

// A Work stands for one issued call, for several that were issued together, or for a call that completed at once: then
// it has no operation. An operation that runs during a fork goes on in the parent. In the child it has failed.
class Work {
 public:
  // `arrays` are those that result() gives: one array, a list or tuple of them, or None for no array. `source` is the
  // sender's group rank of a message that was received at once.
  Work(std::shared_ptr<PythonEngine> engine, std::shared_ptr<Group> group, std::string op, nb::handle arrays,
       int source = -1);
  void add(std::shared_ptr<Issued> issued) { issued_.push_back(std::move(issued)); }
  // Stand for all these calls of the group.
  void join(const nb::list& works);

  const std::string& op() const { return op_; }
  bool wait(nb::handle timeout);
  // Of a blocking call: one that a signal's handler interrupts ends.
  void wait_as_blocking();
  bool is_completed() const;
  bool is_success() const { return is_completed() && exception().is_none(); }
  nb::object exception() const;
  nb::object result();
  // The stream of a GPU on which all calls are queued; null before that, and for calls on host memory.
  CudaStream stream() const;
  void block_current_stream();
  int source_rank();
  int source() const;  // group rank, of a message that has been received
  std::string describe() const;
  static nb::object get_future(nb::handle self);

 private:
  std::string where() const;
  bool wait_for(const Issued& issued, Deadline deadline) const;
  bool wait_for(const Issued& issued, GroupOperation& operation, Deadline deadline) const;
  bool let_streams_wait(const Issued& issued, Deadline deadline) const;
  ArrayStreams let_current_streams_wait(const Issued& issued) const;
  bool is_completed(const Issued& issued) const;
  nb::object exception(const Issued& issued) const;
  nb::object exception(const Issued& issued, const Failure& failure) const;
  void on_completion(nb::object callback) const;
  void complete_future();

  std::shared_ptr<PythonEngine> engine_;
  std::shared_ptr<Group> group_;
  std::vector<std::shared_ptr<Issued>> issued_;
  std::string op_;
  int source_;
  nb::object arrays_;
  nb::object future_;  // until it has completed: what it calls back may refer to the Work
};

}  // namespace procgroup
