#include "runtime/stack_sampler.hpp"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <sstream>
#include <utility>

#include "base/clock.hpp"
#include "base/futex.hpp"

namespace procgroup {
namespace {

constexpr int64_t kAnswerNs = 100'000'000;
constexpr size_t kMostBytes = 8192;

// For the handler, which has no other way to them.
struct sigaction python_handler;
std::atomic<uint32_t> taken{0};

void take(int signal, siginfo_t* information, void* context) {
  if ((python_handler.sa_flags & SA_SIGINFO) != 0)
    python_handler.sa_sigaction(signal, information, context);
  else
    python_handler.sa_handler(signal);
  taken.fetch_add(1, std::memory_order_release);
  futex_wake_all(taken);
}

// Of a stack as faulthandler writes it.
std::string without_frames_of(const std::string& left_out, const std::string& stack) {
  if (left_out.empty()) return stack;
  std::string kept;
  std::istringstream lines(stack);
  for (std::string line; std::getline(lines, line);)
    if (!line.starts_with("  File \"" + left_out)) kept += line + "\n";
  return kept;
}

}  // namespace

StackSampler& StackSampler::of_process() {
  static StackSampler sampler;
  return sampler;
}

void StackSampler::install(int signal, int file, std::string left_out) {
  const std::lock_guard lock(mutex_);
  if (sigaction(signal, nullptr, &python_handler) != 0) return;
  if ((python_handler.sa_flags & SA_SIGINFO) == 0 &&
      (python_handler.sa_handler == SIG_DFL || python_handler.sa_handler == SIG_IGN))
    return;
  struct sigaction ours = python_handler;
  ours.sa_flags |= SA_SIGINFO | SA_RESTART;
  ours.sa_sigaction = take;
  if (sigaction(signal, &ours, nullptr) != 0) return;
  signal_ = signal;
  file_ = file;
  left_out_ = std::move(left_out);
}

// Without a handler the signal would end the process.
bool StackSampler::is_installed() const {
  struct sigaction now;
  return signal_ != 0 && sigaction(signal_, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == take;
}

std::string StackSampler::sample(pid_t thread) {
  const std::lock_guard lock(mutex_);
  if (!is_installed()) return "";
  if (ftruncate(file_, 0) != 0 || lseek(file_, 0, SEEK_SET) != 0) return "";
  const uint32_t before = taken.load(std::memory_order_acquire);
  if (syscall(SYS_tgkill, getpid(), thread, signal_) != 0) return "";
  const Deadline deadline = Deadline::after(static_cast<double>(kAnswerNs) / 1e9);
  while (taken.load(std::memory_order_acquire) == before) {
    if (deadline.passed()) return "";
    futex_wait(taken, before, deadline.remaining_ns(kAnswerNs));
  }
  std::string text(kMostBytes, '\0');
  const ssize_t bytes = pread(file_, text.data(), text.size(), 0);
  text.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return without_frames_of(left_out_, text);
}

}  // namespace procgroup
