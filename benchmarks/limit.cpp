// What the hardware allows: all_reduce(SUM) of float32 between processes over one shared mapping, without Python,
// checks, numbering or deadlines. It takes part in the benchmark as one more peer: `limit SOCKET RANKS [--pin]`.
//
// Vocabulary:
//   flag    one cache line per rank, two of each by turns: a sequence number, and up to 56 bytes of payload beside it
//   slot    where a rank copies a chunk of its array to, two of each by turns
//   chunk   what is copied between two barriers; the best length is tried out once per size
//
//   direct   (2 ranks, or small): copy my chunk into my slot | barrier | add the others' slots to my array
//   scatter  (more than 2, large): copy my chunk into my slot | barrier | add my segment of all slots into the result |
//            barrier | copy the result back
//
// Order: a rank's payload and slot are written before its flag (release) and read after it was seen (acquire). Of two
// that take turns, the one written at sequence s is free again at s + 2: nobody publishes s + 1 before it has read s.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kMostRanks = 16;
constexpr size_t kPayload = 56;
constexpr size_t kLongestChunk = size_t{1} << 20;
constexpr size_t kFloatsPerLine = 64 / sizeof(float);

struct alignas(64) Flag {
  std::atomic<uint64_t> sequence;
  unsigned char payload[kPayload];
};

struct Arena {
  Flag flags[2][kMostRanks];
  alignas(64) size_t chosen_chunk;
  size_t chosen_scatter;
  alignas(4096) float slots[2][kMostRanks][kLongestChunk / sizeof(float)];
  alignas(4096) float result[kLongestChunk / sizeof(float)];
};

int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

void add(float* __restrict into, const float* __restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] += from[i];
}

void add(float* __restrict into, const float* __restrict left, const float* __restrict right, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = left[i] + right[i];
}

class Rank {
 public:
  Rank(Arena& arena, int rank, int ranks)
      : arena_(arena), rank_(rank), ranks_(ranks), yields_(ranks > sysconf(_SC_NPROCESSORS_ONLN)) {}

  void all_reduce(float* array, size_t count) {
    if (count * sizeof(float) <= kPayload) return all_reduce_in_flags(array, count);
    const size_t chunk = chunk_ / sizeof(float);
    for (size_t start = 0; start < count; start += chunk) {
      const size_t length = std::min(chunk, count - start);
      scatter_ ? reduce_scattered(array + start, length) : reduce_direct(array + start, length);
    }
  }

  // Tries every scheme and chunk; rank 0 decides for all.
  void choose(float* array, size_t count) {
    const size_t bytes = count * sizeof(float);
    const int repeats = static_cast<int>(std::clamp<size_t>((size_t{16} << 20) / bytes, 1, 100));
    int64_t best = INT64_MAX;
    for (const bool scatter : {false, true}) {
      if (scatter && ranks_ == 2) continue;
      for (size_t chunk = size_t{16} << 10; chunk <= kLongestChunk; chunk *= 2) {
        chunk_ = chunk;
        scatter_ = scatter;
        const int64_t time = fastest_of(repeats, array, count);
        if (rank_ == 0 && time < best) {
          best = time;
          arena_.chosen_chunk = chunk;
          arena_.chosen_scatter = scatter;
        }
        if (chunk >= bytes) break;
      }
    }
    barrier();
    chunk_ = arena_.chosen_chunk;
    scatter_ = arena_.chosen_scatter != 0;
    barrier();
  }

  void barrier() {
    publish();
    wait_for_all();
  }

 private:
  void publish() { mine().sequence.store(sequence_, std::memory_order_release); }

  Flag& mine() { return arena_.flags[sequence_ % 2][rank_]; }

  void wait_for_all() {
    for (int other = 0; other < ranks_; ++other) {
      const std::atomic<uint64_t>& flag = arena_.flags[sequence_ % 2][other].sequence;
      while (flag.load(std::memory_order_acquire) < sequence_) {
        if (yields_) {
          sched_yield();
        } else {
#if defined(__x86_64__)
          __builtin_ia32_pause();
#endif
        }
      }
    }
    ++sequence_;
  }

  void all_reduce_in_flags(float* array, size_t count) {
    const Flag(&flags)[kMostRanks] = arena_.flags[sequence_ % 2];
    std::memcpy(mine().payload, array, count * sizeof(float));
    publish();
    wait_for_all();
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      float theirs[kPayload / sizeof(float)];
      std::memcpy(theirs, flags[other].payload, count * sizeof(float));
      add(array, theirs, count);
    }
  }

  void reduce_direct(float* array, size_t count) {
    const auto& slots = arena_.slots[sequence_ % 2];
    std::memcpy(arena_.slots[sequence_ % 2][rank_], array, count * sizeof(float));
    barrier();
    for (int other = 0; other < ranks_; ++other) {
      if (other != rank_) add(array, slots[other], count);
    }
  }

  void reduce_scattered(float* array, size_t count) {
    // One set of slots is enough: nobody passes the second barrier before all have read them.
    auto& slots = arena_.slots[0];
    std::memcpy(slots[rank_], array, count * sizeof(float));
    const size_t lines = (count + kFloatsPerLine - 1) / kFloatsPerLine;
    const size_t begin = std::min(lines * rank_ / ranks_ * kFloatsPerLine, count);
    const size_t end = std::min(lines * (rank_ + 1) / ranks_ * kFloatsPerLine, count);
    barrier();
    add(arena_.result + begin, slots[0] + begin, slots[1] + begin, end - begin);
    for (int other = 2; other < ranks_; ++other) add(arena_.result + begin, slots[other] + begin, end - begin);
    barrier();
    std::memcpy(array, arena_.result, count * sizeof(float));
  }

  // The best of three means. One call alone would look fast to a rank that arrived last and did not wait.
  int64_t fastest_of(int repeats, float* array, size_t count) {
    int64_t fastest = INT64_MAX;
    for (int attempt = 0; attempt < 3; ++attempt) {
      const int64_t start = nanoseconds(CLOCK_MONOTONIC);
      for (int i = 0; i < repeats; ++i) all_reduce(array, count);
      fastest = std::min(fastest, (nanoseconds(CLOCK_MONOTONIC) - start) / repeats);
    }
    return fastest;
  }

  Arena& arena_;
  const int rank_;
  const int ranks_;
  const bool yields_;
  uint64_t sequence_ = 1;
  size_t chunk_ = size_t{64} << 10;
  bool scatter_ = false;
};

// The lines of src/procgroup/diagnostics/bench/peer.py, answered by one rank.
class Service {
 public:
  Service(Rank& rank, int number, int ranks) : rank_(rank), number_(number), ranks_(ranks) {}

  std::string answer(const std::string& command) {
    const int64_t idle = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - processor_time_;
    std::istringstream words(command);
    std::string verb, operation;
    size_t bytes = 0, samples = 0, calls = 0;
    words >> verb >> operation >> bytes >> samples >> calls;
    if (verb != "measure" || (operation != "all_reduce" && operation != "barrier")) {
      return "error this peer does not measure " + operation;
    }
    if (operation == "all_reduce" && !prepare(bytes)) return "error all_reduce gave a wrong result";
    std::ostringstream line;
    line << "times " << idle;
    for (const int64_t time : measure(operation == "barrier", samples, calls)) line << ' ' << time;
    processor_time_ = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
    return line.str();
  }

 private:
  bool prepare(size_t bytes) {
    if (bytes == prepared_bytes_) return true;
    prepared_bytes_ = bytes;
    const size_t count = std::max<size_t>(bytes / sizeof(float), 1);
    array_.assign(count, 0.0f);
    rank_.choose(array_.data(), count);
    std::fill(array_.begin(), array_.end(), static_cast<float>(number_ + 1));
    rank_.all_reduce(array_.data(), count);
    const float sum = static_cast<float>(ranks_ * (ranks_ + 1)) / 2;
    const bool right = std::all_of(array_.begin(), array_.end(), [sum](float value) { return value == sum; });
    std::fill(array_.begin(), array_.end(), 0.0f);
    return right;
  }

  std::vector<int64_t> measure(bool barrier, size_t samples, size_t calls) {
    const auto call = [&] { barrier ? rank_.barrier() : rank_.all_reduce(array_.data(), array_.size()); };
    for (size_t i = 0; i < std::max<size_t>(1, samples * calls / 20); ++i) call();
    std::vector<int64_t> times(samples);
    for (int64_t& time : times) {
      const int64_t start = nanoseconds(CLOCK_MONOTONIC);
      for (size_t i = 0; i < calls; ++i) call();
      time = nanoseconds(CLOCK_MONOTONIC) - start;
    }
    return times;
  }

  Rank& rank_;
  const int number_;
  const int ranks_;
  std::vector<float> array_;
  size_t prepared_bytes_ = SIZE_MAX;
  int64_t processor_time_ = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
};

struct CloseFile {
  void operator()(FILE* file) const { fclose(file); }
};

std::unique_ptr<FILE, CloseFile> connect_to(const char* path) {
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  std::unique_ptr<FILE, CloseFile> stream(fdopen(descriptor, "r+"));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  if (!stream || connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error(std::string("cannot connect to ") + path + ": " + std::strerror(errno));
  }
  return stream;
}

bool say(FILE* driver, const std::string& text) {
  const std::string line = text + "\n";
  size_t sent = 0;
  while (sent < line.size()) {
    const ssize_t count = send(fileno(driver), line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return false;
    sent += static_cast<size_t>(count);
  }
  return true;
}

void pin_to_one_core(int rank) {
  cpu_set_t usable, chosen;
  CPU_ZERO(&chosen);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  int place = rank % CPU_COUNT(&usable);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable) && place-- == 0) CPU_SET(core, &chosen);
  }
  sched_setaffinity(0, sizeof(chosen), &chosen);
}

int serve(Arena& arena, const char* path, int number, int ranks, bool pin) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (pin) pin_to_one_core(number);
  const auto driver = connect_to(path);
  Rank rank(arena, number, ranks);
  Service service(rank, number, ranks);
  std::ostringstream hello;
  hello << "hello " << number << ' ' << ranks << " bare C++, "
        << (ranks > sysconf(_SC_NPROCESSORS_ONLN) ? "yield" : "spin");
  say(driver.get(), hello.str());
  char line[256];
  while (fgets(line, sizeof(line), driver.get()) != nullptr && std::strncmp(line, "quit", 4) != 0) {
    if (!say(driver.get(), service.answer(line))) break;
  }
  return 0;
}

// One that ends badly takes the others along: they would spin for it forever.
int wait_for(std::vector<pid_t> children) {
  int worst = 0;
  while (!children.empty()) {
    int status = 0;
    const pid_t ended = wait(&status);
    if (ended < 0) return 1;
    std::erase(children, ended);
    if (status == 0) continue;
    worst = 1;
    for (const pid_t child : children) kill(child, SIGKILL);
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 0;
  if (ranks < 2 || ranks > kMostRanks) {
    std::fprintf(stderr, "usage: %s SOCKET RANKS [--pin]   (2 to %d ranks)\n", argv[0], kMostRanks);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  void* memory = mmap(nullptr, sizeof(Arena), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  Arena& arena = *new (memory) Arena;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        return serve(arena, argv[1], rank, ranks, argc > 3 && std::strcmp(argv[3], "--pin") == 0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        return 1;
      }
    }
    if (child > 0) children.push_back(child);
  }
  return wait_for(std::move(children));
}
