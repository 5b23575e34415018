// What a rank is doing, in words: for the errors and log lines of ranks that wait for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/flight_record.hpp"
#include "runtime/recorder.hpp"

namespace procgroup {

struct NamedGroup {
  std::string name;
  std::vector<int> global_ranks;  // see rank_name
  std::string members{};          // "ranks 1, 2"; where the group is being made
};

// A group of this rank; without a name when this rank has no such group.
using FindGroup = std::function<NamedGroup(uint64_t identity)>;

// "ranks 1, 2", or "5 ranks" where the record had no room for them.
std::string name_members(const RecordedGroup& group);

// The call site of this number, as in "train.py:12"; empty when it is not known.
using FindSourceLine = std::function<std::string(uint32_t number)>;

// For whom a running collective waits.
using FindAwaited = std::function<AwaitedRanks(const Descriptor& call)>;

// The end of a path and the line, "train.py:12" for "/home/me/train.py:12".
std::string short_line(const std::string& line);

// The number of the source line of a group's call number `sequence`: of a collective, whichever that was, or of a
// message of this kind. 0 when it is not known.
uint32_t find_source(const FlightRecordView& record, const Descriptor& call);
// The same as it was recorded: see FlightRecordView::call_site.
std::string find_line(const FlightRecordView& record, const Descriptor& call);

// The same of the last call of this kind that has started and not ended. Of a new group with its members.
std::string find_line_of_wait(const FlightRecordView& record, OpKind op);

// Whether one of these calls has started, and not ended.
bool is_in_call(const std::vector<Record>& records);

// Describes a rank by its records, for a reader who waits for it in the group `asking`; follows "rank 1 is":
// "in recv of 4 float64 from rank 0 (call #3) at train.py:12",
// "in barrier (call #2 on group 1, waiting for rank 3) at train.py:11",
// "in no call for 12 s; its last was barrier (call #2) at train.py:11".
std::string describe_calls(const std::vector<Record>& records, uint64_t asking, const FindGroup& find_group,
                           const FindSourceLine& find_source_line, const FindAwaited& find_awaited);

// Two frames of a stack as Python's faulthandler writes it: the innermost one, and the one that says most of the
// others: the innermost of the program's own, or its caller. "in load (data.py:88), called by main (train.py:20)";
// empty when there is none.
std::string describe_stack(const std::string& stack);

}  // namespace procgroup
