// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): what the handshakes prove a job key with.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace procgroup {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

// Compares in a time that does not depend on where the digests differ.
bool same_digest(const Digest& left, const Digest& right);

// Fills `data` from the kernel's generator; throws std::system_error when there is none.
void fill_random(void* data, size_t bytes);

}  // namespace procgroup
