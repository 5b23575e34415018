#include "base/file_descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <unordered_set>
#include <vector>

namespace procgroup {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_set<int> open;
  std::vector<void (*)()> last_uses;
  // Relaxed: it changes only in a child that has a single thread.
  std::atomic<uint64_t> generation{0};
};

void close_all_in_child();

// Never destroyed: objects with static lifetime may close their descriptors after it would be.
Registry& registry() {
  static Registry* const only = [] {
    auto* made = new Registry;
    pthread_atfork([] { fork_mutex().lock(); }, [] { fork_mutex().unlock(); }, close_all_in_child);
    return made;
  }();
  return *only;
}

void close_all_in_child() {
  Registry& mine = registry();
  for (const auto use : mine.last_uses) use();
  for (const int number : mine.open) ::close(number);
  mine.open.clear();
  mine.generation.fetch_add(1, std::memory_order_relaxed);
  mine.mutex.unlock();
}

}  // namespace

std::mutex& fork_mutex() { return registry().mutex; }

uint64_t fork_generation() { return registry().generation.load(std::memory_order_relaxed); }

void use_in_forked_child(void (*use)()) {
  const std::lock_guard lock(fork_mutex());
  registry().last_uses.push_back(use);
}

FileDescriptor::FileDescriptor(int number) : number_(number), generation_(fork_generation()) {
  if (number < 0) return;
  const std::lock_guard lock(fork_mutex());
  registry().open.insert(number);
}

void FileDescriptor::reset() {
  const int number = std::exchange(number_, -1);
  if (number < 0 || generation_ != fork_generation()) return;
  const std::lock_guard lock(fork_mutex());
  registry().open.erase(number);
  ::close(number);
}

}  // namespace procgroup
