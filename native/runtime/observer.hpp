// Observes this rank for the others, on a thread of its own, whatever the threads of the program do: keeps the flight
// record's beat, and takes the stack of the thread that makes calls when another rank asks for it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

#include "runtime/flight_record.hpp"

namespace procgroup {

class Observer {
 public:
  static constexpr int64_t kBeatNs = 100'000'000;
  // Between two stacks at least: who asks without end must not stop the program.
  static constexpr int64_t kStackNs = 50'000'000;

  // `every_beat` is run on the observer's thread, after each beat and each request.
  Observer(FlightRecord& record, std::function<void()> every_beat);
  Observer(const Observer&) = delete;
  ~Observer() { stop(); }

  // The calling thread makes calls: its stack tells what this rank is doing.
  void note_caller() { caller_.store(own_thread(), std::memory_order_relaxed); }
  void stop();

 private:
  static pid_t own_thread();
  void run();
  void answer(uint32_t request);

  FlightRecord& record_;
  const std::function<void()> every_beat_;
  std::atomic<pid_t> caller_;
  std::atomic<bool> stop_{false};
  uint32_t answered_;
  int64_t sampled_ns_ = 0;
  std::thread thread_;
};

}  // namespace procgroup
