// Lines for the user, on standard error.
#pragma once

#include <string>

namespace procgroup {

// Writes one line, if standard error can take it now. Never waits: a pipe that nobody reads must not stop the library.
void write_line(std::string line);

}  // namespace procgroup
