#include "base/log.hpp"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>

namespace procgroup {
namespace {

std::atomic<int> lowest_written{static_cast<int>(LogLevel::kWarning)};
std::atomic<int> own_rank{-1};

const char* name_of(LogLevel level) {
  return level == LogLevel::kInfo ? "INFO" : level == LogLevel::kWarning ? "WARNING" : "ERROR";
}

void write_line(std::string line) {
  // A pipe that is ready for writing takes this many bytes at once.
  if (line.size() >= PIPE_BUF) line.resize(PIPE_BUF - 1);
  line += '\n';
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  if (poll(&out, 1, 0) != 1 || !(out.revents & POLLOUT)) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void set_log(int lowest_level, int rank) {
  lowest_written.store(lowest_level, std::memory_order_relaxed);
  own_rank.store(rank, std::memory_order_relaxed);
}

bool is_logged(LogLevel level) { return static_cast<int>(level) >= lowest_written.load(std::memory_order_relaxed); }

void log_line(LogLevel level, const std::string& text, int rank) {
  if (!is_logged(level)) return;
  if (rank < 0) rank = own_rank.load(std::memory_order_relaxed);
  const std::string prefix = rank < 0 ? "" : "[rank" + std::to_string(rank) + "]: ";
  write_line(prefix + "procgroup " + name_of(level) + ": " + text);
}

}  // namespace procgroup
