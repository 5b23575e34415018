#include "base/standard_error.hpp"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

namespace procgroup {

void write_line(std::string line) {
  // A pipe that is ready for writing takes this many bytes at once.
  if (line.size() >= PIPE_BUF) line.resize(PIPE_BUF - 1);
  line += '\n';
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  if (poll(&out, 1, 0) != 1 || !(out.revents & POLLOUT)) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace procgroup
