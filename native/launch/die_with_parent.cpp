// Run a command in a process that the kernel kills when the process that started it ends:
//
//     die_with_parent PARENT_PID CPUS COMMAND ARGUMENT...
//
// CPUS are the numbers of those CPUs that the command may run on, with commas between them, or "" for all.
//
// The request to the kernel survives exec, so the command need not know of it. It is made in a program of its own
// because nothing but the bare system calls may run between fork and exec in a process with threads, and Python's
// subprocess offers no such request there. The kernel sends the signal when the *thread* that started this process
// ends: start it from a thread that lives as long as its process.

#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int kNotExecutable = 126;  // as shells report it
constexpr int kNotFound = 127;
constexpr int kMaxCpus = 8 * CPU_SETSIZE;

void die_with(long parent_pid) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    std::perror("procgroup run: prctl(PR_SET_PDEATHSIG)");
    std::exit(kNotExecutable);
  }
  // A parent that ended before the request is seen here, one that ends after it by the kernel.
  if (getppid() != parent_pid) {
    raise(SIGKILL);
  }
}

// Returns false, with errno, for CPUs that the system refuses.
bool bind_to(const char* cpus) {
  cpu_set_t wanted[kMaxCpus / CPU_SETSIZE] = {};
  for (const char* next = cpus; *next != '\0';) {
    char* end = nullptr;
    const unsigned long cpu = std::strtoul(next, &end, 10);
    if (end == next || cpu >= kMaxCpus) {
      errno = EINVAL;
      return false;
    }
    CPU_SET_S(cpu, sizeof wanted, wanted);
    next = *end == ',' ? end + 1 : end;
  }
  return sched_setaffinity(0, sizeof wanted, wanted) == 0;
}

// Becomes the command, found on PATH where it has no slash. Returns, with errno, when that is impossible. Unlike execvp
// it does not hand a file of no known format to a shell.
void execute(char** command) {
  const char* path = std::getenv("PATH");
  if (std::strchr(*command, '/') != nullptr || path == nullptr) {
    execv(*command, command);
    return;
  }
  int error = ENOENT;
  while (true) {
    const size_t length = std::strcspn(path, ":");
    char candidate[PATH_MAX];
    const int written = std::snprintf(candidate, sizeof candidate, "%.*s%s%s", static_cast<int>(length), path,
                                      length == 0 ? "" : "/", *command);
    if (written < PATH_MAX) {
      execv(candidate, command);
      if (errno != ENOENT && errno != ENOTDIR) {
        error = errno;
      }
    }
    if (path[length] == '\0') {
      break;
    }
    path += length + 1;
  }
  errno = error;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fputs("usage: die_with_parent PARENT_PID CPUS COMMAND ARGUMENT...\n", stderr);
    return 2;
  }
  die_with(std::strtol(arguments[1], nullptr, 10));
  const char* cpus = arguments[2];
  if (*cpus != '\0' && !bind_to(cpus)) {
    std::fprintf(stderr, "procgroup run: cannot bind this rank to CPUs %s: %s; not bound\n", cpus,
                 std::strerror(errno));
  }
  // Python ignores SIGPIPE and SIGXFSZ, and a shell's background jobs ignore SIGINT; exec hands that on.
  for (const int number : {SIGPIPE, SIGXFSZ, SIGINT}) {
    std::signal(number, SIG_DFL);
  }
  char** command = arguments + 3;
  execute(command);
  const int error = errno;
  std::fprintf(stderr, "%s: %s\n", *command, std::strerror(error));
  return error == ENOENT ? kNotFound : kNotExecutable;
}
