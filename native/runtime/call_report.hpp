// What a rank is doing, in words: for the errors and log lines of ranks that wait for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/recorder.hpp"

namespace procgroup {

struct NamedGroup {
  std::string name;
  std::vector<int> global_ranks;  // see rank_name
};

// A group of this rank; without a name when this rank has no such group.
using FindGroup = std::function<NamedGroup(uint64_t identity)>;

// Describes a rank by its records, for a reader who waits for it in the group `asking`; follows "rank 1 is":
// "in recv of 4 float64 from rank 0 (call #3)", "in no call for 12 s".
std::string describe_calls(const std::vector<Record>& records, uint64_t asking, const FindGroup& find_group);

}  // namespace procgroup
