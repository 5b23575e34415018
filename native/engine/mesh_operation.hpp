// A MeshCall as one of a group's operations: it takes the engine's message mutex for every step.
#pragma once

#include <mutex>

#include "engine/engine.hpp"
#include "engine/mesh_call.hpp"
#include "engine/request.hpp"

namespace procgroup {

class MeshOperation final : public Operation {
 public:
  // The state, the request and its arrays outlive the operation.
  MeshOperation(Engine& engine, MeshState& state, const Request& request) : engine_(engine), state_(state) {
    const std::lock_guard lock(engine_.messages_mutex());
    call_.emplace(state_, request);
  }
  ~MeshOperation() override {
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
    if (failure.kind == Failure::Kind::kLost && failure.pid == 0 && failure.peer >= 0)
      failure.pid = engine_.peer_pid(state_.group.world_rank(failure.peer));
    fail(std::move(failure));
  }

  Engine& engine_;
  MeshState& state_;
  std::optional<MeshCall> call_;
};

}  // namespace procgroup
