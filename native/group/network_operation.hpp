// A NetworkCall as one of a group's operations: it takes the engine's message mutex for every step.
#pragma once

#include <mutex>

#include "collectives/network_call.hpp"
#include "group/engine.hpp"
#include "ops/request.hpp"

namespace procgroup {

class NetworkOperation final : public Operation {
 public:
  // The state, the request and its arrays outlive the operation.
  NetworkOperation(Engine& engine, NetworkState& state, const Request& request) : engine_(engine), state_(state) {
    const std::lock_guard lock(engine_.messages_mutex());
    call_.emplace(state_, request);
  }
  ~NetworkOperation() override {
    const std::lock_guard lock(engine_.messages_mutex());
    call_.reset();
  }

  Progress advance() override {
    const std::lock_guard lock(engine_.messages_mutex());
    const bool moved = engine_.pump();
    const Progress progress = call_->advance();
    if (progress == Progress::kDone) conclude();
    return progress == Progress::kWaiting && moved ? Progress::kMoved : progress;
  }
  std::vector<int> missing() const override {
    const std::lock_guard lock(engine_.messages_mutex());
    return call_->missing();
  }
  std::vector<int> absent() const {
    const std::lock_guard lock(engine_.messages_mutex());
    return call_->absent();
  }
  void give_up(Failure failure) override {
    const std::lock_guard lock(engine_.messages_mutex());
    call_->give_up(std::move(failure));
    conclude();
  }

 private:
  void conclude() {
    if (call_->failure() == nullptr) return finish();
    Failure failure = *call_->failure();
    if (failure.peer >= 0) engine_.identify(failure, state_.group.world_rank(failure.peer));
    fail(std::move(failure));
  }

  Engine& engine_;
  NetworkState& state_;
  std::optional<NetworkCall> call_;
};

}  // namespace procgroup
