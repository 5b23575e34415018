// Lines for the user on standard error, in the format and at the levels of procgroup/process/log.py: for native
// threads, which may not wait for the interpreter's lock.
#pragma once

#include <string>

namespace procgroup {

// As Python's logging numbers them.
enum class LogLevel : int { kInfo = 20, kWarning = 30, kError = 40 };

// The lowest level that is written, by default that of warnings; and the global rank of this process, -1: it has none.
void set_log(int lowest_level, int rank);
bool is_logged(LogLevel level);

// Write "[rank3]: procgroup WARNING: text", if the level is written and standard error can take the line now. Never
// waits: a pipe that nobody reads must not stop the library. `rank` is by default that of this process.
void log_line(LogLevel level, const std::string& text, int rank = -1);

}  // namespace procgroup
