// Remembers one call in the recorder, from its start to its end, whatever way it ends.
#pragma once

#include "runtime/failure.hpp"
#include "runtime/recorder.hpp"

namespace procgroup {

class Recording {
 public:
  // A call that starts now, or, `issued`, one that has to wait for its turn.
  Recording(Recorder& recorder, const Descriptor& call, uint32_t source)
      : recorder_(recorder), source_(source), index_(recorder.begin(call, source)) {}
  static Recording issued(Recorder& recorder, const Descriptor& call, uint32_t source) {
    return {recorder, source, recorder.issue(call, source)};
  }

  void start(const Descriptor& call) { index_ = recorder_.start(index_, call, source_); }
  // Its work on a device goes on.
  void queue() { recorder_.queue(index_); }
  void end(const Failure* failure) { failure == nullptr ? recorder_.complete(index_) : recorder_.fail(index_); }

 private:
  Recording(Recorder& recorder, uint32_t source, uint64_t index)
      : recorder_(recorder), source_(source), index_(index) {}

  Recorder& recorder_;
  uint32_t source_;
  uint64_t index_;
};

}  // namespace procgroup
