// One rank's engine as a Python object, with its issued operations and their arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "array_view.hpp"
#include "base/diagnostics.hpp"
#include "device_call.hpp"
#include "exceptions.hpp"
#include "group/engine.hpp"
#include "group/group.hpp"
#include "python_host.hpp"
#include "python_task.hpp"
#include "source_lines.hpp"

namespace procgroup {

namespace nb = nanobind;

// Engines and groups stay as they are in a forked child: their threads and mappings are not there, and their locks
// may be held for ever.
inline std::shared_ptr<Engine> make_engine(const EngineOptions& options, bool shared) {
  return {new Engine(options, shared), [](Engine* engine) {
            if (!engine->forked()) delete engine;
          }};
}

// Without the interpreter's lock: the progress thread may wait for it while it advances a backend's transfer, and the
// group waits for the progress thread.
inline std::shared_ptr<Group> make_group(const std::shared_ptr<Engine>& engine, GroupOptions options) {
  const Unlocked unlocked;
  return {new Group(*engine, std::move(options)), [engine](Group* group) {
            if (engine->forked()) return;
            const Unlocked unlocked;
            delete group;
          }};
}

// An issued operation and its arrays, kept until it has completed. The members are destroyed from the last to the
// first: the operation, which may still be running, before its arrays, and both before the group.
struct Issued {
  std::shared_ptr<Group> group;
  std::vector<ArrayView> arrays;  // none where a task has them
  std::shared_ptr<GroupOperation> operation;
  nb::object callback;
  std::shared_ptr<PythonTask> backend_task;  // of a program's own backend
  std::shared_ptr<DeviceTask> device_task;   // of a call on arrays on a GPU, which are these
  std::shared_ptr<const KeptMemory> device_arrays;

  // The work on a device that the completed call has queued; null where there is none.
  const GroupOperation* device_work() const {
    return operation->is_completed() ? operation->device_work().get() : nullptr;
  }
  bool is_completed() const {
    return operation->is_completed() && (device_work() == nullptr || device_work()->is_completed());
  }
  const Failure* failure() const {
    if (!operation->is_completed() || operation->failure() != nullptr || device_work() == nullptr)
      return operation->failure();
    return device_work()->is_completed() ? device_work()->failure() : nullptr;
  }
  nb::handle error() const { return backend_task ? backend_task->error() : nb::handle(); }
};

class PythonEngine {
 public:
  PythonEngine(const EngineOptions& options, bool shared)
      : engine_(make_engine(options, shared)), source_lines_(engine_->record()) {}
  ~PythonEngine() { close(); }

  const std::shared_ptr<Engine>& engine() const {
    require_not_forked();
    return engine_;
  }
  bool forked() const { return engine_->forked(); }
  static nb::object forked_error() {
    return nb::module_::import_("procgroup.errors").attr("ForkedProcessError")("a process group");
  }
  void require_not_forked() const {
    if (forked()) raise(forked_error());
  }

  // The number of the line of the program that makes a call now: see SourceLines.
  uint32_t source_line() {
    if constexpr (!kDiagnoses) return 0;
    engine_->note_caller();
    return source_lines_.here();
  }

  // Set-up: this engine's rank is one of these threads.
  void set_rank_threads(std::shared_ptr<const RankThreads> threads) { rank_threads_ = std::move(threads); }
  const RankThreads* rank_threads() const { return rank_threads_.get(); }

  // Operations mostly complete in the order in which they were issued; the others are searched for when there are many.
  void keep(std::shared_ptr<Issued> issued) {
    while (!issued_.empty() && is_completed(*issued_.front())) {
      const std::shared_ptr<Issued> completed =
          std::move(issued_.front());  // ends when `issued_` is whole: see sweep()
      issued_.pop_front();
    }
    if (issued_.size() >= crowded_) sweep();
    issued_.push_back(std::move(issued));
  }
  // Release the arrays of completed operations. That may run Python code, which may enter this function again, so it
  // happens when `issued_` is consistent.
  void sweep() {
    const auto completed = std::stable_partition(
        issued_.begin(), issued_.end(), [](const std::shared_ptr<Issued>& issued) { return !is_completed(*issued); });
    const std::vector<std::shared_ptr<Issued>> ended(std::make_move_iterator(completed),
                                                     std::make_move_iterator(issued_.end()));
    issued_.erase(completed, issued_.end());
    crowded_ = std::max(kFewIssued, 2 * issued_.size());
  }

  // `start` starts the completion thread, when the first operation is watched.
  void on_first_watch(nb::object start) { start_watching_ = std::move(start); }
  void watch() {
    if (const nb::object start = std::exchange(start_watching_, nb::object()); start.is_valid()) start();
  }

  // One turn of the completion thread: wait for completions, then run their callbacks. False when it
  // was the last turn: close() has ended all pending operations.
  bool run_completions(double seconds) {
    const bool last = closed_;
    if (!last) {
      const Unlocked unlocked;
      seen_ = engine_->await_completions(seen_, seconds);
    }
    std::vector<nb::object> due;
    for (const std::shared_ptr<Issued>& issued : issued_)
      if (issued->callback.is_valid() && issued->is_completed()) due.push_back(std::move(issued->callback));
    sweep();
    for (const nb::object& callback : due) {
      const OwnThreads::EndsTask ends;
      callback();
    }
    return !last;
  }

  // The last calls of this rank, oldest first.
  nb::list records() const {
    require_not_forked();
    nb::list list;
    for (const Record& record : engine_->recorder().read()) {
      nb::dict entry;
      entry["op"] = op_name(record.call.op);
      entry["sequence"] = record.call.sequence;
      entry["call"] = record.call.describe();
      entry["state"] = call_state_name(record.state);
      entry["started_ns"] = record.started_ns;
      entry["ended_ns"] = record.ended_ns;
      entry["source"] = engine_->record().view().source_line(record.source);
      list.append(entry);
    }
    return list;
  }

  bool flush(double seconds) {
    require_not_forked();
    const Unlocked unlocked;
    return engine_->flush(seconds);
  }

  void fail(std::string reason, bool at_once, const std::string& origin, int peer) {
    const RecordedFailure failure{std::move(reason), failure_origin(origin), peer};
    if (engine_->forked()) return;
    const Unlocked unlocked;
    engine_->fail(failure, at_once);
  }

  void close() {
    if (engine_->forked()) {
      // Their threads do not exist here; what they were working on must not be touched.
      for (std::shared_ptr<Issued>& issued : issued_) new std::shared_ptr<Issued>(std::move(issued));
      issued_.clear();
      return;
    }
    closed_ = true;
    start_watching_.reset();  // it holds the backend, which holds this engine
    {
      const Unlocked unlocked;
      engine_->shutdown();
    }
    engine_->completed();  // wakes the completion thread, so that it ends
  }

 private:
  static constexpr size_t kFewIssued = 16;

  static bool is_completed(const Issued& issued) { return issued.is_completed() && !issued.callback.is_valid(); }

  std::shared_ptr<Engine> engine_;
  SourceLines source_lines_;
  std::shared_ptr<const RankThreads> rank_threads_;
  std::deque<std::shared_ptr<Issued>> issued_;
  size_t crowded_ = kFewIssued;  // issued_ is swept when it is as long as this
  nb::object start_watching_;
  uint64_t seen_ = 0;
  bool closed_ = false;
};

}  // namespace procgroup
