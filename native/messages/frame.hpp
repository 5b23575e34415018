// The frames of a channel between two ranks.
//
// Vocabulary. A *frame* is a header of fixed size and then `payload` bytes. The *number* of a large
// message is counted by its sender, per channel; frames about one message carry its number.
//
//   eager message          sender                receiver
//                            eager(key) + bytes ---->         kept as unexpected, or copied to its receive
//
//   large message            announce(key, number, total) --> kept as unexpected, until a receive matches
//                            <-------------- grant(number)
//                            data(number) + bytes ---->       straight into the receive's buffer,
//                            data(number) + bytes ---->       at most kBulkBytes in each frame
//
//   larger, on one host      announce, and an exposure --->   read from the sender's buffer when matched, see
//                            <-------------- taken(number)    single_copy.hpp; grant when it cannot be read: as above
//
//   sizes differ, or the     <-- refuse(number, capacity)     the sender's transfer fails
//   receive was cancelled
//   the send was cancelled   withdraw(key, number) ---->      the receiver forgets the message
//
// A refuse and a withdraw, or a grant and a withdraw, may cross on the wire: the one that finds nothing
// with its number is ignored; so is a taken for a message that is not exposed. Data with an unknown number cannot
// happen and ends the connection. Headers are sent in their memory layout: all ranks are little-endian, which the
// handshake has checked.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "messages/messages.hpp"

namespace procgroup {

inline constexpr size_t kBulkBytes = 256 * 1024;     // of a large message in one frame; others may go in between
inline constexpr uint32_t kFrameMagic = 0x31664750;  // "PGf1"

enum class FrameKind : uint16_t { kEager, kAnnounce, kGrant, kData, kRefuse, kWithdraw, kTaken };

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind;
  uint16_t type = 0;    // eager, announce: of the elements
  MessageKey key{};     // eager, announce, withdraw
  uint64_t number = 0;  // all but eager
  uint64_t bytes = 0;   // eager, data: of the payload; announce: of the message; refuse: of the receive
};
static_assert(sizeof(FrameHeader) == 40 && std::is_trivially_copyable_v<FrameHeader>);
static_assert(std::endian::native == std::endian::little, "headers are sent in their memory layout");

inline FrameHeader eager_header(MessageKey key, size_t bytes, ElementType type) {
  return {.kind = FrameKind::kEager, .type = type, .key = key, .bytes = bytes};
}

// A header that no correct peer sends.
struct MalformedFrame {
  std::string reason;
};

// Bytes that follow the header. Throws MalformedFrame unless the header is one that a peer may send.
inline size_t payload_bytes(const FrameHeader& header) {
  if (header.magic != kFrameMagic) throw MalformedFrame{"it sent bytes that are not a frame"};
  switch (header.kind) {
    case FrameKind::kEager:
      if (header.bytes > kEagerBytes) throw MalformedFrame{"it sent an eager frame above the limit"};
      return static_cast<size_t>(header.bytes);
    case FrameKind::kData:
      if (header.bytes == 0 || header.bytes > kBulkBytes) throw MalformedFrame{"it sent a data frame out of bounds"};
      return static_cast<size_t>(header.bytes);
    case FrameKind::kAnnounce:
      if (header.bytes <= kEagerBytes) throw MalformedFrame{"it announced a message that is small"};
      return 0;
    case FrameKind::kGrant:
    case FrameKind::kRefuse:
    case FrameKind::kWithdraw:
    case FrameKind::kTaken:
      return 0;
  }
  throw MalformedFrame{"it sent a frame of unknown kind " + std::to_string(static_cast<uint32_t>(header.kind))};
}

}  // namespace procgroup
