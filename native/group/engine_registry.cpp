#include "group/engine_registry.hpp"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "group/engine.hpp"

namespace procgroup {
namespace {

// Both live for ever: fork handlers may run while the process is ending.
std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::vector<Engine*>& registry() {
  static auto* engines = new std::vector<Engine*>;
  return *engines;
}

// The mutex is held across the fork, so that the child finds the registry whole.
void before_fork() { registry_mutex().lock(); }
void in_parent() { registry_mutex().unlock(); }
void in_child() {
  for (Engine* engine : registry()) engine->abandon();
  registry().clear();
  registry_mutex().unlock();
}

}  // namespace

void register_engine(Engine* engine) {
  static const int installed = pthread_atfork(before_fork, in_parent, in_child);
  static_cast<void>(installed);
  const std::lock_guard lock(registry_mutex());
  registry().push_back(engine);
}

void unregister_engine(Engine* engine) {
  const std::lock_guard lock(registry_mutex());
  std::erase(registry(), engine);
}

void report_progress(std::string_view text) {
  const std::lock_guard lock(registry_mutex());
  for (Engine* engine : registry()) engine->record().set_report(text);
}

}  // namespace procgroup
