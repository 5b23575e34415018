// The engines of this process: each is notified in a forked child, and each one's flight record has the program's last
// report.
//
// The child has a copy of the parent's memory, but none of its threads and no mapping of what is shared. Its
// descriptors are closed already (base/file_descriptor.hpp).
#pragma once

#include <string_view>

namespace procgroup {

class Engine;

void register_engine(Engine* engine);
void unregister_engine(Engine* engine);

// Write what the program reports (procgroup.report) to the flight record of every engine. Ranks that are threads of
// one process report together. A forked child has no engine of its parent's.
void report_progress(std::string_view text);

}  // namespace procgroup
