// The wire protocol between a store's clients and its server.
//
// Vocabulary. A *connection* carries one *handshake* and then *frames*. A *request* is a frame from the
// client; it has exactly one *reply*, a frame with the same request number. A request *waits* when its
// reply depends on a later request of another client (get of a missing key, barrier, ...). Deadlines are
// the client's: when one passes, the client sends *cancel*, and the reply to the waiting request is
// kCancelled, unless another reply was sent before. So requests and replies stay in step.
//
//   client                                  server
//     | -- Hello (128 bytes) ----------------> |   client's id, job and nonce
//     | <---------------- Welcome (148 bytes)- |   admission, server's nonce, its proof of the job key
//     | -- Proof (32 bytes) -----------------> |   only when the job has a key
//     | <------------------ Verdict (4 bytes)- |   only when the job has a key
//     | -- frame: get "a" -------------------> |
//     | <------------------- frame: kOk, value-|
//
//   frame:    0        4    5       8         12
//             | length | op | zeros | request | body: `length` bytes |
//             (in a reply, op is a Status)
//   field:    | u32 length | bytes |                 strings inside a body
//
// requests.hpp has the requests, and the parameters in their bodies.
//
// All numbers are little-endian. A proof is HMAC-SHA256(job key, role + Hello + the server's nonce), so
// a proof is valid for one side of one connection only. The key authenticates; it does not encrypt.
// The Hello's magic ends in an empty line, so that an HTTP server on a wrongly given port replies at once
// instead of waiting for more.
//
// Not part of the protocol, on purpose: encryption, a reply in several frames, several replies to one
// request, resuming a lost connection. A client uses a connection for one request at a time and opens
// another connection for a second thread.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.hpp"

namespace procgroup::store {

static_assert(std::endian::native == std::endian::little, "the store's protocol is written for little-endian machines");

inline constexpr std::string_view kMagic{"PGSTORE1\r\n\r\n", 12};
inline constexpr uint32_t kVersion = 3;

inline constexpr size_t kMaxKeyBytes = 64 * 1024;
inline constexpr size_t kMaxValueBytes = size_t{1} << 30;
inline constexpr size_t kMaxFrameBytes = kMaxValueBytes + (size_t{1} << 20);
inline constexpr size_t kMaxKeysPerRequest = 65'536;
inline constexpr size_t kMaxConnections = 65'536;
// Waiting requests of one connection; this bounds the replies that are queued for it.
inline constexpr size_t kMaxWaitsPerConnection = 64;
// Keys that one connection may register with kSetOnDisconnect.
inline constexpr size_t kMaxKeysOnDisconnect = 64;
inline constexpr double kHandshakeSeconds = 10;

enum class Status : uint8_t {
  kOk,
  kCancelled,
  kQueueEmpty,
  kError,     // body: text
  kTooLarge,  // body: u64 size that the value would have had
  kUnless,    // body: the value that ended the wait
};

enum class Admission : uint32_t { kWelcome, kOtherVersion, kOtherJob, kKeyNeeded, kWrongKey, kFull };

enum HelloFlag : uint32_t {
  kHasKey = 1,
  kJoins = 2,  // counts among the workers that kWorkers waits for
  kHost = 4,   // belongs to the process that hosts the server; the server does not wait for its end
};

struct Hello {
  char magic[12];
  uint32_t version;
  uint32_t flags;
  uint32_t client[2];  // random; the connections of one client share it
  uint8_t nonce[32];
  char job[64];      // name of the job, padded with zeros; all zeros: unknown
  uint32_t process;  // the client's process id, for messages
};
static_assert(sizeof(Hello) == 128);

struct Welcome {
  char magic[12];
  uint32_t version;
  uint32_t admission;
  uint8_t nonce[32];
  char job[64];
  Digest proof;
};
static_assert(sizeof(Welcome) == 148);

struct Header {
  uint32_t length;
  uint8_t op;
  uint8_t zeros[3];
  uint32_t request;
};
static_assert(sizeof(Header) == 12);

// A peer violated the protocol; its connection is closed.
struct ProtocolError {
  std::string reason;
};

// The first 24 bytes, with a dot for each byte that is not printable, for log lines.
inline std::string printable(std::string_view bytes) {
  std::string text(bytes.substr(0, 24));
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 32 || c > 126; }, '.');
  return text;
}

inline void put(std::string& body, uint64_t number) { body.append(reinterpret_cast<const char*>(&number), 8); }
inline void put_length(std::string& body, size_t length) {
  const auto narrow = static_cast<uint32_t>(length);
  body.append(reinterpret_cast<const char*>(&narrow), 4);
}
inline void put_field(std::string& body, std::string_view bytes) {
  put_length(body, bytes.size());
  body.append(bytes);
}

// Reads a body from its beginning; every take throws ProtocolError when the body is too short.
class BodyReader {
 public:
  explicit BodyReader(std::string_view body) : left_(body) {}

  bool at_end() const { return left_.empty(); }
  template <class Number>
  Number take() {
    Number number;
    std::memcpy(&number, take_bytes(sizeof(Number)).data(), sizeof(Number));
    return number;
  }
  std::string_view take_field() { return take_bytes(take<uint32_t>()); }
  std::string_view take_key() {
    const std::string_view key = take_field();
    if (key.size() > kMaxKeyBytes) throw ProtocolError{"a key of " + std::to_string(key.size()) + " bytes"};
    return key;
  }
  std::string_view take_value() {
    const std::string_view value = take_field();
    if (value.size() > kMaxValueBytes) throw ProtocolError{"a value of " + std::to_string(value.size()) + " bytes"};
    return value;
  }
  // Take a count, and call `take_one` so many times.
  template <class Take>
  auto take_several(Take take_one) {
    std::vector<decltype(take_one())> taken;
    const auto count = take<uint32_t>();
    if (count > kMaxKeysPerRequest) throw ProtocolError{"a request with too many keys"};
    while (taken.size() < count) taken.push_back(take_one());
    return taken;
  }
  void finish() const {
    if (!left_.empty()) throw ProtocolError{"a frame with " + std::to_string(left_.size()) + " bytes too many"};
  }

 private:
  std::string_view take_bytes(size_t bytes) {
    if (bytes > left_.size()) throw ProtocolError{"a frame that ends inside a field"};
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }

  std::string_view left_;
};

// The messages of the handshake and their verification, as pure functions.
struct Identity {
  std::string job;      // name of the job; empty: unknown
  std::string job_key;  // the job's secret; empty: none
};

Hello make_hello(const Identity& mine, uint64_t client, uint32_t flags);
Welcome make_welcome(const Identity& mine, const Hello& hello);
Welcome make_refusal(const Identity& mine, Admission reason);
Digest client_proof(const Identity& mine, const Hello& hello, const Welcome& welcome);
bool server_proof_holds(const Identity& mine, const Hello& hello, const Welcome& welcome);

inline uint64_t client_of(const Hello& hello) { return uint64_t{hello.client[1]} << 32 | hello.client[0]; }
std::string job_of(const char (&field)[64]);

}  // namespace procgroup::store
