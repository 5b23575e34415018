// Remembers one call in the recorder, from its start to its end, whatever way it ends.
#pragma once

#include "runtime/failure.hpp"
#include "runtime/recorder.hpp"

namespace procgroup {

class Recording {
 public:
  Recording(Recorder& recorder, const Descriptor& call) : recorder_(recorder), index_(recorder.begin(call)) {}

  void end(const Failure* failure) { failure == nullptr ? recorder_.complete(index_) : recorder_.fail(index_); }

 private:
  Recorder& recorder_;
  uint64_t index_;
};

}  // namespace procgroup
