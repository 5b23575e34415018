// Flight records for Python: to read those of any process, to write what this one reports, and to install the signal
// that takes stacks.
#include "runtime/flight_record.hpp"

#include <errno.h>
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <system_error>

#include "bindings.hpp"
#include "group/engine_registry.hpp"
#include "runtime/stack_sampler.hpp"

using namespace nanobind::literals;

namespace nb = nanobind;

using namespace procgroup;

namespace {

nb::object text_at(const auto& value) {
  if (!value) return nb::none();
  return nb::make_tuple(value->ns,
                        nb::bytes(value->text.data(), value->text.size()).attr("decode")("utf-8", "replace"));
}

nb::dict call_of(const FlightRecordView& view, const Record& record) {
  const Descriptor& call = record.call;
  nb::dict entry;
  entry["index"] = record.index;
  entry["group"] = call.group;
  entry["sequence"] = call.sequence;
  entry["op"] = op_name(call.op);
  entry["call"] = call.describe();
  entry["is_message"] = is_message(call.op);
  entry["root"] = call.root;
  entry["bytes"] = call.bytes();
  entry["state"] = call_state_name(record.state);
  entry["source"] = view.source_line(record.source);
  entry["issued_ns"] = record.issued_ns;
  entry["started_ns"] = record.started_ns;
  entry["ended_ns"] = record.ended_ns;
  return entry;
}

bool has_ended(const Record& call) { return call.state == CallState::kCompleted || call.state == CallState::kFailed; }

// Of the calls: the newest, this many, and those that have not ended.
nb::dict read_flight_record(const std::string& path, size_t newest) {
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  std::unique_ptr<FlightRecord> record;
  try {
    record = FlightRecord::attach(std::move(file));
  } catch (const std::runtime_error& error) {
    throw nb::value_error((path + ": " + error.what()).c_str());
  }
  const FlightRecordView view = record->view();
  const RecordedRank rank = view.rank();
  nb::dict entry;
  entry["rank"] = rank.rank;
  entry["world_size"] = rank.world_size;
  entry["job"] = rank.job;
  entry["program"] = rank.program;
  entry["pid"] = view.pid();
  entry["host"] = view.host();
  entry["boot"] = view.boot();
  entry["created_wall_ns"] = view.created_wall_ns();
  entry["created_ns"] = view.created_ns();
  entry["beat_ns"] = view.beat_ns();
  entry["state"] = rank_state_name(view.state());
  const RecordedFailure failure = view.failure();
  entry["reason"] = failure.reason;
  entry["origin"] = failure_origin_name(failure.origin);
  entry["failed_peer"] = failure.peer;
  entry["stopped"] = describe_stopped(view);
  const uint64_t recorded = view.recorded();
  entry["recorded"] = recorded;
  entry["stack"] = text_at(view.stack());
  entry["report"] = text_at(view.report());
  nb::list groups;
  for (const RecordedGroup& group : view.groups()) {
    nb::dict one;
    one["identity"] = group.identity;
    one["name"] = group.name;
    one["rank"] = group.rank;
    one["size"] = group.size;
    one["members"] = nb::cast(group.members);
    groups.append(one);
  }
  entry["groups"] = groups;
  nb::list calls;
  for (const Record& call : view.calls())
    if (call.index + newest >= recorded || !has_ended(call)) calls.append(call_of(view, call));
  entry["calls"] = calls;
  return entry;
}

void request_stack(const std::string& path) {
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  FlightRecord::attach(std::move(file))->request_stack();
}

}  // namespace

void bind_flight_record(nb::module_& module) {
  module.def("read_flight_record", &read_flight_record, "path"_a, "newest"_a = Recorder::kEntries,
             nb::sig("def read_flight_record(path: str, newest: int = 1024) -> dict[str, typing.Any]"));
  module.def("request_stack", &request_stack, "path"_a);
  module.def("report", &report_progress, "text"_a);
  module.def(
      "install_stack_signal",
      [](int number, int file, std::string left_out) {
        StackSampler::of_process().install(number, file, std::move(left_out));
      },
      "number"_a, "file"_a, "left_out"_a);
}
