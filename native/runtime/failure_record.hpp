// A failure as other ranks read it, in shared memory and in messages:
//
//     +------+----------------------------------------+- - - - - - - - - - - -+
//     | head | bitmap: one bit per rank, set: missing | text, at most 4 KiB   |
//     +------+----------------------------------------+- - - - - - - - - - - -+
//             <--------------- details --------------->
//
// The head has a fixed size and is enough to name the cause. A reader trusts nothing in a record: another process wrote
// it, and may be writing it still.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "ops/descriptor.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

inline constexpr size_t kFailureTextBytes = 4096;
inline constexpr size_t kHostBytes = 64;

struct FailureHead {
  FailureKind kind;
  FailureKind cause;
  uint16_t text_bytes;
  int32_t peer;
  uint32_t ranks;   // bits of the bitmap
  uint32_t sudden;  // of a process that ends: whether every call in which it takes part fails now
  int64_t pid;
  double seconds;
  Descriptor call;  // the call that failed; of kind barrier and number 0 when there is none
  std::array<char, kHostBytes> host;
};
static_assert(std::is_trivially_copyable_v<FailureHead>);

FailureHead head_of(const Failure& failure, int ranks);
// The bitmap and the text that belong to head_of(failure, ranks).
std::vector<std::byte> details_of(const Failure& failure, int ranks);
// Head and details as one message.
std::vector<std::byte> encode(const Failure& failure, int ranks);

// The length of the longest record.
size_t largest_record(int ranks);
// How many bytes of details a head announces.
size_t details_bytes(const FailureHead& head);
// Read what another rank wrote. Details that are too short are left out; text comes out printable. Nothing when the
// head makes no sense among so many ranks.
std::optional<Failure> decode(const FailureHead& head, std::span<const std::byte> details, int ranks);
std::optional<Failure> decode(std::span<const std::byte> record, int ranks);

}  // namespace procgroup
