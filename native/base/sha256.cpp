#include "base/sha256.hpp"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

namespace procgroup {
namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void expand(const uint8_t* block, uint32_t (&words)[64]) {
  for (int i = 0; i < 16; ++i) words[i] = load_big_endian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = words[i - 15];
    const uint32_t b = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + words[i - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
}

void absorb(State& state, const uint8_t* block) {
  uint32_t words[64];
  expand(block, words);
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + words[i];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State mixed{a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += mixed[i];
}

}  // namespace

Digest sha256(std::string_view message) {
  State state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = reinterpret_cast<const uint8_t*>(message.data());
  const size_t whole = message.size() / kBlockBytes * kBlockBytes;
  for (size_t i = 0; i < whole; i += kBlockBytes) absorb(state, bytes + i);

  // The tail: what is left, a one bit, zeros, and the length in bits; one block, or two.
  uint8_t tail[2 * kBlockBytes] = {};
  const size_t left = message.size() - whole;
  if (left > 0) std::memcpy(tail, bytes + whole, left);
  tail[left] = 0x80;
  const size_t size = left < kBlockBytes - 8 ? kBlockBytes : 2 * kBlockBytes;
  const uint64_t bits = uint64_t{message.size()} * 8;
  for (int i = 0; i < 8; ++i) tail[size - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  for (size_t i = 0; i < size; i += kBlockBytes) absorb(state, tail + i);

  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view message) {
  std::string inner(kBlockBytes, '\0');
  if (key.size() > kBlockBytes) {
    const Digest digest = sha256(key);
    std::memcpy(inner.data(), digest.data(), digest.size());
  } else {
    key.copy(inner.data(), key.size());
  }
  std::string outer = inner;
  for (char& byte : inner) byte ^= 0x36;
  for (char& byte : outer) byte ^= 0x5c;
  const Digest first = sha256(inner.append(message));
  return sha256(outer.append(reinterpret_cast<const char*>(first.data()), first.size()));
}

// In constant time: how many bytes are equal must not show.
bool same_digest(const Digest& left, const Digest& right) {
  uint8_t difference = 0;
  for (size_t i = 0; i < left.size(); ++i) difference |= left[i] ^ right[i];
  return difference == 0;
}

void fill_random(void* data, size_t bytes) {
  auto* next = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(next, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "getrandom");
    next += got;
    bytes -= static_cast<size_t>(got);
  }
}

}  // namespace procgroup
