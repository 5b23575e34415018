// The end of a rank, or of its part in a group, as another rank knows it.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/descriptor.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

struct MemberEnd {
  // The most telling first.
  enum class How : uint8_t {
    kRaised,        // its program has raised an exception that ends every call in which it takes part
    kLost,          // its process has ended without leaving
    kDisconnected,  // its connection has ended without a message that it leaves
    kFailed,        // it has posted why its part in the group has failed
    kLeft,          // it has left in order, which ends the calls that still await it
    kEnding,        // its program has raised an exception, and completes its calls
  };

  How how;
  Failure why;  // who, and why, as this rank reports it
  // The last collective in which it takes part, and which may therefore complete; nothing: there is none.
  std::optional<uint64_t> after{};

  // Whether it ends this call, which may be a message: those have no order.
  bool ends(const Descriptor& running) const {
    return how != How::kEnding && (!after || is_message(running.op) || running.sequence > *after);
  }
};

}  // namespace procgroup
